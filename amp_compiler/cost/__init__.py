"""What an op costs on a device: data sheets as data, and the time of a node and of a graph from its shapes and dtypes.

>>> from amp_compiler.cost.devices import find
>>> find("a100_80").bandwidth
2039000000000.0
"""
