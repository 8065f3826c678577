"""Trainers that people already use, with this package's precision: one module per trainer.

No module is imported before it is asked for, as ``amp_compiler.integrations.lightning``. Each needs the package that it
is named after: ``pip install "amp-compiler[lightning]"``.
"""
