"""What happens when a compiled model is called: its graphs are captured, rewritten and run, and so is other code.

``captured.py`` calls a model under Dynamo, whose graphs go to ``backend.py``; ``state.py`` records them.
``outside.py`` runs code that is not captured; ``regions.py`` and ``products.py`` set its precision.
"""
