"""A gradient that is differentiated, as a gradient penalty does: compiled graphs cannot do it, and plain code can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..common.errors import CaptureError


@contextlib.contextmanager
def told_of_double_backward() -> Iterator[None]:
    """Explain AOTAutograd's refusal of a double backward inside."""
    try:
        yield
    except RuntimeError as error:
        if "double backward" not in str(error):
            raise
        raise CaptureError(
            "The model differentiates a gradient (a gradient penalty, torch.autograd.grad with create_graph=True), "
            "which a compiled graph cannot do. Move that code, with the forward that it differentiates, into a method "
            "or function of its own, and put @torch.compiler.disable above it: it then runs as plain Python, with its "
            "products in low precision, and the rest stays compiled."
        ) from error
