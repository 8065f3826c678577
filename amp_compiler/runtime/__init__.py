"""What happens when a compiled model is called: capture, rewrite and run its graphs, and what is outside of them.

``captured.py`` calls a model under Dynamo, whose graphs go to ``backend.py``; ``state.py`` remembers them.
``outside.py`` is in charge of code that is not captured, ``regions.py`` and ``products.py`` of its precision.
"""
