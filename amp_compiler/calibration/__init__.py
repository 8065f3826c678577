"""Measured ranges: what the values of a model are on a user's data, and how much low precision would change them.

``calibrate.py`` runs the batches, ``calibration.py`` is the result and its file.
"""
