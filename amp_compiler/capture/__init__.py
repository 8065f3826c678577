"""From a model to graphs and back: the only room that touches torch's tracing internals.

``dynamo.py`` and ``export.py`` are the two front ends; both end in pre-dispatch ATen (``lower.py`` brings
Dynamo's graphs there). ``autodiff.py`` hands a rewritten graph to AOTAutograd and runs the result.
Everything here was written against torch 2.13; each use of a private name says why.
"""
