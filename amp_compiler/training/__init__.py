"""One call for a whole training step: ``compile_train_step``.

``step.py`` is what users see, ``arguments.py`` checks what they give; ``window.py`` holds what lives from one update to
the next; ``whole.py`` runs model, loss, backward and loss scaling as one graph; ``pieces.py`` runs a model that breaks
the graph; ``rerun.py``, ``probe.py`` and ``overflow.py`` find the op that went to inf or NaN; ``checkpoint.py`` saves
and restores a run; ``owner.py`` knows whose tensors are trained. ``scalers.py`` has the loss scalers, which also serve
a loop of the user's own.
"""
