"""Measured ranges: what the values of a model are on a user's data, and how much low precision would change them.

``calibrate.py`` runs the batches and ``recorder.py`` watches them, ``row.py`` and ``calibration.py`` are the result and
its file, ``ranks.py`` puts those of several processes together, ``scale.py`` finds the scale of the loss, ``text.py``
and ``measured.py`` put it into words, ``page.py`` into a page.
"""
