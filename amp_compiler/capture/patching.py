"""Replacing a function of torch's for the duration of a block, for the thread that asks for it only.

Dynamo and ``torch.export`` have no hooks where the twin (``twin.py``) needs one. A replaced attribute is visible to the
whole process, so calls of other threads are handed to the original, and only one thread replaces at a time.
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
    """Inside, ``owner.name`` is ``new`` for calls of this thread.

    Another thread that replaces something waits until this block ends: were two blocks to overlap, the first to end
    would put back what the second has replaced.
    """
    thread = threading.get_ident()
    with _ONE_AT_A_TIME:
        old = getattr(owner, name)
        inherited = name not in vars(owner)
        held = vars(owner).get(name)  # not ``old``: a static method is stored otherwise than it is read

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
