"""Inference conversion: an fp32 model in, a mixed-precision artifact out.

``convert.py`` exports and rewrites, ``converted.py`` is what a user gets, ``archive.py`` writes and reads its files,
``loading.py`` loads them, ``running.py`` makes the graph that runs in memory, ``onnx.py`` writes ONNX.
"""
