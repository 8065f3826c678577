"""``amp_compile``: compile an fp32 model to mixed precision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn

from .common.errors import ArgumentError
from .cost.device import Device
from .module import AmpMethod, AmpModule
from .policy import Policy
from .policy.ops.names import OpLike
from .runtime.arguments import check_request
from .runtime.options import Options


@overload
def amp_compile(
    model: Callable[..., Any], level: str = ..., *, dtype: torch.dtype | str | None = ..., policy: Policy | None = ...,
    white_list: Iterable[OpLike] = ..., black_list: Iterable[OpLike] = ...,
    exclude: Iterable[str | type[nn.Module]] = ..., backend: str = ..., keep_output_dtypes: bool = ...,
    dynamic: bool | None = ..., fullgraph: bool = ..., disable_passes: Iterable[str] = ...,
    device: str | os.PathLike[str] | Device | None = ...,
) -> AmpModule: ...  # fmt: skip
@overload
def amp_compile(
    model: None = None, level: str = ..., *, dtype: torch.dtype | str | None = ..., policy: Policy | None = ...,
    white_list: Iterable[OpLike] = ..., black_list: Iterable[OpLike] = ...,
    exclude: Iterable[str | type[nn.Module]] = ..., backend: str = ..., keep_output_dtypes: bool = ...,
    dynamic: bool | None = ..., fullgraph: bool = ..., disable_passes: Iterable[str] = ...,
    device: str | os.PathLike[str] | Device | None = ...,
) -> Callable[[Callable[..., Any]], AmpModule]: ...  # fmt: skip
def amp_compile(
    model: Callable[..., Any] | None = None,
    level: str = "O2",
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | None = None,
    white_list: Iterable[OpLike] = (),
    black_list: Iterable[OpLike] = (),
    exclude: Iterable[str | type[nn.Module]] = (),
    backend: str = "auto",
    keep_output_dtypes: bool = True,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    disable_passes: Iterable[str] = (),
    device: str | os.PathLike[str] | Device | None = None,
) -> Any:
    """Compile a module or a function to mixed precision.

    The model is captured at the first call of the result. Its own parameters stay as they are and are cast in each
    call, so optimizers and checkpoints work unchanged; the model itself is never modified. A part of the model that was
    compiled before keeps its own policy, and the other options are those given here.

    Args:
        model: A module or a function. Without it, ``amp_compile(level=...)`` is a decorator.
        level: How much runs in low precision: ``"O0"`` (nothing), ``"O1"``, ``"auto"``, ``"O2"`` or ``"O3"``
            (everything that can).
        dtype: The low-precision dtype, ``torch.float16`` or ``torch.bfloat16``. By default fp16 on CUDA and bf16
            elsewhere.
        policy: A ``Policy`` to use instead of ``level`` and ``dtype``.
        white_list: Ops to run in low precision, by name (``"softmax"``) or function (``torch.softmax``).
        black_list: Ops to run in fp32.
        exclude: Modules to leave in fp32, by path pattern (``"encoder.layers.0.*"``) or class.
        backend: What runs the graphs: ``"eager"``, ``"inductor"``, or ``"auto"``, which is Inductor on CUDA and eager
            elsewhere.
        keep_output_dtypes: Return outputs in the dtypes that the fp32 model gives them. If False, they stay as
            computed.
        dynamic: As for ``torch.compile``: True traces with dynamic sizes from the start, False never, None when sizes
            change.
        fullgraph: Raise a ``CaptureError`` if the model is not one graph.
        disable_passes: Names of passes to leave out, to find out which of them matters. ``amp-compiler passes`` lists
            them.
        device: The name of a GPU (``"a100_80"``) or the path of a TOML file that describes one. Level ``"auto"`` then
            gives each op that may run in either precision the one that makes ops and casts together take the least time
            there; ``report()`` says what the other one would cost. Other levels take none.

    Returns:
        An ``AmpModule``, or a decorator that makes one if ``model`` was left out.

    Raises:
        ArgumentError: If an argument is not valid; a name that is misspelled is suggested.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from amp_compiler import amp_compile
        >>> fast = amp_compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), level="O1")
        >>> fast(torch.ones(1, 4)).dtype
        torch.float32
        >>> fast.report().by_precision["bfloat16"]
        3
    """
    for name, value, allowed in (("dynamic", dynamic, (True, False, None)), ("fullgraph", fullgraph, (True, False)),
                                 ("keep_output_dtypes", keep_output_dtypes, (True, False))):  # fmt: skip
        if not any(value is choice for choice in allowed):
            raise ArgumentError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}.")
    # checked here, so that errors show at once even if the decorator below is never applied
    asked = check_request(level, dtype, policy, white_list, black_list, exclude, backend, disable_passes, device)

    def compile_one(target: Callable[..., Any]) -> AmpModule | AmpMethod:
        if isinstance(target, (AmpModule, AmpMethod)):
            raise ArgumentError("This module is compiled already: compile module.original with the new options.")
        if isinstance(target, type) or not callable(target):
            what = f"the class {target.__name__}" if isinstance(target, type) else f"{type(target).__name__} {target!r}"
            raise ArgumentError(f"amp_compile takes a torch.nn.Module or a function, not {what}.")
        owner = getattr(target, "__self__", None)
        of_a_module = isinstance(owner, nn.Module)
        options = Options(
            asked.policy_for(owner if of_a_module else target), backend, keep_output_dtypes, dynamic, fullgraph,
            asked.disable_passes, asked.device,
        )  # fmt: skip
        made = AmpModule(target, options)
        return AmpMethod(made) if of_a_module else made

    return compile_one if model is None else compile_one(model)


