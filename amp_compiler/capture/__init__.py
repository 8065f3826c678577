"""Capture of graphs from models, and back: the only package that touches torch's tracing internals.

``dynamo.py`` and ``export.py`` are the two front ends; both end in pre-dispatch ATen.

- Dynamo: ``dynamo.py`` compiles a function with a ``Handle`` of ``handle.py``; ``frames.py`` and ``trampolines.py``
  follow the code that is not captured, ``effects.py`` finds what the frame being compiled reads and assigns, and
  ``remedies.py`` advises users on graph breaks.
- Lowering to pre-dispatch ATen: ``lower.py``, with ``interpreter.py`` (runs the graph under the tracer),
  ``higher_order.py``, ``vmap.py``, ``recurrent.py`` (ops that need care) and ``origin.py`` (names and module paths).
- Code that reads dtypes: ``dtype_reads.py`` finds it, ``followed.py`` follows dtypes to the calls that name them, and
  where that is not enough, ``twin.py`` traces the same code in low precision, with ``promotion.py``; both use
  ``patching.py``.
- ``program.py`` takes ExportedPrograms apart and rebuilds them; ``autodiff.py`` passes a rewritten graph to AOTAutograd
  and runs the result; ``undifferentiated.py`` stands in for AOTAutograd where nothing needs a gradient.

Everything here was written against torch 2.13; each use of a private name says why.
"""
