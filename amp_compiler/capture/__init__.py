"""From a model to graphs and back: the room that touches torch's tracing internals.

``dynamo.py`` and ``export.py`` are the two front ends; both end in pre-dispatch ATen.

- Dynamo: ``dynamo.py`` compiles a function with a ``handle.py``; ``frames.py`` and ``trampolines.py`` follow the code
  that is not captured, ``effects.py`` tells what the frame being compiled reads and assigns, ``remedies.py`` what a
  user can do about a graph break.
- Lowering to pre-dispatch ATen: ``lower.py``, with ``interpreter.py`` (runs the graph under the tracer),
  ``higher_order.py``, ``vmap.py``, ``recurrent.py`` (ops that need care) and ``origin.py`` (names and module paths).
- The twin, the same code in the low dtype: ``dtype_reads.py`` (is one needed?), ``twin.py``, ``promotion.py``,
  ``patching.py``.
- ``program.py`` takes ExportedPrograms apart and puts them together; ``autodiff.py`` hands a rewritten graph to
  AOTAutograd and runs the result.

Everything here was written against torch 2.13; each use of a private name says why.
"""
