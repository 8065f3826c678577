"""What differs between the releases of torch that the package supports.

Every other file is written for all of them. Differences are detected by features (an op exists, an attribute exists),
not by version numbers; the version itself is read in one place, ``check_release``, which refuses releases that are
known to give wrong results and warns about untested releases.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

#: The first release that works, and the first that was not tested. ``pyproject.toml`` says the same.
OLDEST, UNTESTED = (2, 13), (2, 16)

#: Ops that only some of the supported releases have, with the releases. Rows of the op table and names on autocast's
#: lists that are not here must exist in every release: a test checks it, so a misspelt name cannot hide.
OPS_OF_SOME_RELEASES = {
    "cholesky": "removed in 2.14 (torch.linalg.cholesky stays)",
    "qr": "removed in 2.14 (torch.linalg.qr stays)",
    "linalg_matrix_sqrth": "new in 2.14",
}


def has_op(name: str) -> bool:
    """True if the running torch has this ATen op; ``name`` may carry an overload (``"conv2d.padding"``)."""
    import torch

    plain = name.partition(".")[0]
    return plain not in OPS_OF_SOME_RELEASES or hasattr(torch.ops.aten, plain)


def attribute_method(variable: type) -> str:
    """Return the name of the method by which Dynamo's variables look up an attribute: ``tp_getattro_impl`` since torch
    2.14, ``var_getattr`` before."""
    return "tp_getattro_impl" if hasattr(variable, "tp_getattro_impl") else "var_getattr"


def can_be_printed_later(variable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if Dynamo can make a call of a logging function at the end of the graph. Before torch 2.15 its check took
    the function as well, and let keyword arguments pass, which are then lost."""
    check = type(variable).can_reorder_logs
    takes_function = len(inspect.signature(check).parameters) == 3
    given = (variable.value, args, kwargs) if takes_function else (args, kwargs)
    return not kwargs and bool(check(*given))


def torch_version() -> str:
    """Return the version of torch without importing it, which takes a second that ``--help`` does not need."""
    loaded = sys.modules.get("torch")
    try:
        return str(getattr(loaded, "__version__", "")) or metadata.version("torch")
    except metadata.PackageNotFoundError:  # a build that is only on the path: import it to find out
        import torch

        return torch.__version__


def release(version: str) -> tuple[int, int] | None:
    """Return the major and minor release of a version string.

    >>> release("2.13.0+cpu"), release("2.16.0a0+git1234"), release("unknown")
    ((2, 13), (2, 16), None)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def check_release(version: str | None = None) -> None:
    """Raise for a torch that is too old, warn for one that is newer than any that was tested. Called once, when the
    package is imported."""
    version = version or torch_version()
    found = release(version)
    if found is None:
        return
    oldest, newest = ".".join(map(str, OLDEST)), f"{UNTESTED[0]}.{UNTESTED[1] - 1}"
    if found < OLDEST:
        raise ImportError(
            f"amp_compiler needs torch {oldest} to {newest}, but this is torch {version}. Earlier releases trace some "
            "models differently, and the results are silently wrong. Install a newer torch: "
            f"pip install 'torch>={oldest},<{UNTESTED[0]}.{UNTESTED[1]}'"
        )
    if found >= UNTESTED:
        warnings.warn(
            f"amp_compiler is tested with torch {oldest} to {newest}, but this is torch {version}. It relies on "
            "tracing internals that may have changed; compare a few results with torch.autocast, or install "
            f"'torch>={oldest},<{UNTESTED[0]}.{UNTESTED[1]}'.",
            stacklevel=3,
        )
