"""Custom ops under the ``amp::`` namespace, one file per kernel.

Each file holds a pure-torch reference that defines the op's meaning, its fake implementation and its launchers. A
kernel imports torch, triton and ``common/``, and nothing here is imported before it is needed. ``cpp/`` holds the CPU
kernels in C++, which ``build.py`` compiles on the machine that runs them; each has an equivalent in Python, and
``registry.py`` knows which of the two runs.
"""
