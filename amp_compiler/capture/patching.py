"""Replace a function of torch for the duration of a block, in the current thread only.

Dynamo and ``torch.export`` have no hooks where the twin (``twin.py``) needs one. A replaced attribute is visible to the
whole process, so calls from other threads go to the original, and only one thread replaces at a time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, ``owner.name`` is ``new`` for calls from this thread.

    Another thread that replaces something waits until this block ends: if two blocks overlapped, the first to end
    would restore what the second has replaced.
    """
    thread = threading.get_ident()
    with _ONE_AT_A_TIME:
        old = getattr(owner, name)
        inherited = name not in vars(owner)
        held = vars(owner).get(name)  # not ``old``: what is stored for a static method differs from what is read

        @functools.wraps(old)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (new if threading.get_ident() == thread else old)(*args, **kwargs)

        setattr(owner, name, call)
        try:
            yield
        finally:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, held)
