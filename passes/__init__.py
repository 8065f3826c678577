"""The passes, one a file; their order is in ``amp_compiler/passes/order.py``, how to write one in ``README.md``."""
