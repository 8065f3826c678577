"""The passes, one a file; their order is in ``amp_compiler/pipeline.py``, how to write one in ``README.md``."""
