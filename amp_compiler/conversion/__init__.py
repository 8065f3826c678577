"""Conversion of a trained fp32 model into a mixed-precision program for inference.

``convert.py`` exports and rewrites, ``converted.py`` is the result, ``archive.py`` writes and reads its files,
``loading.py`` loads them, ``running.py`` builds the graph that runs in memory, ``onnx.py`` writes ONNX.
"""
