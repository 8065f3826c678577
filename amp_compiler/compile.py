"""``amp_compile``: a model in fp32 in, the same model in mixed precision out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn

from .common.errors import ArgumentError
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
) -> AmpModule: ...  # fmt: skip
@overload
def amp_compile(
    model: None = None, level: str = ..., *, dtype: torch.dtype | str | None = ..., policy: Policy | None = ...,
    white_list: Iterable[OpLike] = ..., black_list: Iterable[OpLike] = ...,
    exclude: Iterable[str | type[nn.Module]] = ..., backend: str = ..., keep_output_dtypes: bool = ...,
    dynamic: bool | None = ..., fullgraph: bool = ..., disable_passes: Iterable[str] = ...,
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
) -> Any:
    """Compile a module or function to mixed precision; it is captured at its first call.

    ``level``: "O0", "O1", "auto", "O2" or "O3". ``dtype``: float16 or bfloat16 (default: fp16 on CUDA, bf16
    elsewhere). ``policy``: a ``Policy`` instead of level and dtype. ``white_list`` / ``black_list``: ops to run
    low / in fp32. ``exclude``: modules to leave in fp32, by path pattern or class. ``backend``: "eager",
    "inductor" or "auto" (inductor on CUDA). ``disable_passes``: names of passes to leave out.
    The model itself is never changed. Without a model it is a decorator. A part of the model that is amp_compile'd
    already keeps its own policy; the other options are those given here.

    >>> fast = amp_compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), level="O1")
    >>> _ = fast(torch.ones(1, 4))
    >>> fast.report().by_precision["bfloat16"]
    3
    """
    for name, value, allowed in (("dynamic", dynamic, (True, False, None)), ("fullgraph", fullgraph, (True, False)),
                                 ("keep_output_dtypes", keep_output_dtypes, (True, False))):  # fmt: skip
        if not any(value is choice for choice in allowed):
            raise ArgumentError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}.")
    # made once for a wrong name to show at once; the decorator below may never be applied
    asked = check_request(level, dtype, policy, white_list, black_list, exclude, backend, disable_passes)

    def compile_one(target: Callable[..., Any]) -> AmpModule | AmpMethod:
        if isinstance(target, (AmpModule, AmpMethod)):
            raise ArgumentError("This module is amp_compile'd already: compile module.original with the new options.")
        if isinstance(target, type) or not callable(target):
            what = f"the class {target.__name__}" if isinstance(target, type) else f"{type(target).__name__} {target!r}"
            raise ArgumentError(f"amp_compile takes a torch.nn.Module or a function, not {what}.")
        options = Options(
            asked.policy_for(target), backend, keep_output_dtypes, dynamic, fullgraph, asked.disable_passes
        )
        made = AmpModule(target, options)
        of_a_module = isinstance(getattr(target, "__self__", None), nn.Module)
        return AmpMethod(made) if of_a_module else made

    return compile_one if model is None else compile_one(model)


