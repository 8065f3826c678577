"""Keyword arguments that nobody takes: an error that names the function which the user has called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from .messages import suggestion

P = ParamSpec("P")
T = TypeVar("T")


def check_keywords(called: str, given: Iterable[str], *functions: Callable[..., object]) -> None:
    """Raise a ``TypeError``, as Python does, if one of the names ``given`` is no keyword argument of any of
    ``functions``.

    ``called``: what the user has called.

    >>> check_keywords("fit()", ["key"], sorted)
    >>> check_keywords("fit()", ["kei"], sorted)
    Traceback (most recent call last):
    TypeError: fit() got an unexpected keyword argument 'kei'. Did you mean 'key'?
    """
    known = {name for function in functions for name in _names(function)}
    for name in given:
        if name not in known:
            hint = suggestion(name, sorted(known), otherwise=f"It takes: {', '.join(sorted(known))}.")
            raise TypeError(f"{called} got an unexpected keyword argument {name!r}. {hint}")


def names_its_keywords(called: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator by which a function that takes no other keywords checks them with ``check_keywords``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            check_keywords(called, kwargs, function)
            return function(*args, **kwargs)

        return run

    return decorate


def _names(function: Callable[..., object]) -> Iterable[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in kinds and name != "self":
            yield name
