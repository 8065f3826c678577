"""A function that runs under Dynamo with our back end, with the settings and warnings that this needs.

``amp_compile`` and ``compile_train_step`` both call their model through a ``Captured``.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..capture import dynamo, settings
from ..capture.wrappers import given_low, is_own_break, is_wrapped, units_note
from ..common.errors import AmpError, AmpWarning, ArgumentError, CaptureError
from ..common.messages import first_line, users_frame
from ..common.torch_names import is_any_autocast_enabled
from ..policy import dtype_name
from ..policy.scopes import begin_call, end_call, scopes_opened
from .backend import Backend
from .low_parameters import warn_if_low
from .options import Options
from .outside import Uncaptured
from .regions import HERE, suspended
from .state import State


class Captured:
    """A function that runs in mixed precision: Dynamo captures it at its first call, ``backend`` rewrites the graphs.

    ``target``: the model, or function, whose modules the policy names. ``wide``: which of the arguments count as wide.
    """

    def __init__(
        self, function: Callable[..., Any], target: Any, options: Options, state: State, backend: Backend | None = None,
        wide: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.options, self.state, self._wide, self._target = options, state, wide, target
        self._backend = backend or Backend(target, options, state)
        #: a model that an optimizer may train that we don't know, until a call in training mode has looked at it
        #: (what fully_shard makes low for a call is updated in fp32)
        seen = backend is None and isinstance(target, nn.Module) and not given_low(target)
        self._trained_elsewhere = target if seen else None
        leaves_code = not options.fullgraph and options.policy.rewrites
        self._outside = Uncaptured(target, options, state, self._backend) if leaves_code else None
        self._wrapped = state.handed.notes_low = is_wrapped(target)
        if (units := units_note(target)) is not None:
            state.note(units)
        for dtype in given_low(target) - {options.policy.low}:
            low, given = dtype_name(options.policy.low), dtype_name(dtype)
            state.leave(
                f"the MixedPrecisionPolicy of fully_shard rounds parameters and inputs to {given}, and ops run in "
                f"{low}: leave param_dtype out, or ask for dtype=torch.{given} here"
            )
        self._function, self._dynamic = function, options.dynamic
        self._run = self._compile()

    def _compile(self) -> Any:
        return dynamo.compile_frame(
            self._function, self._backend, dynamic=self._dynamic, fullgraph=self.options.fullgraph,
            outside=self._outside,
        )  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._backend.state is not self.state:  # another policy has taken what was captured
            self._capture_anew()
        outside = self._outside
        if outside is not None:
            outside.begin()
        # none of these regions is there as a rule, and a call of a small model is as long as three context managers
        if HERE.region is None and not is_any_autocast_enabled() and (outside is None or not outside.under_autocast):
            return self._enclosed(args, kwargs)
        whole = outside.call() if outside is not None else contextlib.nullcontext()
        with suspended(), self._no_autocast(), whole:
            return self._enclosed(args, kwargs)

    def _enclosed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that no region of other code encloses."""
        state, running = self.state, self.state.running
        before, pieces = dynamo.Tally.now(), len(state.pieces)
        state.handed.begin(None if self._wide is None else self._wide(*args, **kwargs))
        around = begin_call()
        outer, running.entered = running.entered, around
        try:
            if around.scopes:
                state.leave("a precision scope only works inside a model's code; around a call of it, it does nothing")
            result = self._run(*args, **kwargs)
        except Exception as error:
            state.warned.add("raised")
            explained = _explain(error, self.options.fullgraph)
            if explained is None:
                raise
            if isinstance(explained, ArgumentError):  # the user's mistake: Dynamo's frames say nothing about it
                raise explained.with_traceback(None) from None
            raise explained from error
        finally:
            running.entered = outer
            end_call()
            state.handed.end()
        if scopes_opened() > around.opened and "scope" not in state.warned:
            state.warned.add("scope")
            why = "; ".join(reason.in_full() for reason in before.breaks_since()) or "see not_captured in the report"
            state.leave(
                "a precision scope has a graph break inside it, and Dynamo then runs the function that contains it as "
                "plain Python: its own ops run in fp32, what it calls inside the scope is compiled for the scope's "
                f"precision. Move the break out of the scope, or mark a module with set_precision. The break: {why}"
            )
        if not state.pieces:
            self._nothing_captured(before.skipped_since("raised" in state.warned))
        elif len(state.pieces) > pieces:
            breaks = before.breaks_since()
            state.missed(reason for reason in breaks if not (self._wrapped and is_own_break(reason)))
        if self._trained_elsewhere is not None and torch.is_grad_enabled() and self._trained_elsewhere.training:
            warn_if_low(self._trained_elsewhere, state)
            self._trained_elsewhere = None
        if self._outside is not None and self._outside.over_limit:
            self._over_limit(self._outside)
        return result

    def keep_graphs(self) -> None:
        """Keep what is captured from now on, for ``by``."""
        self._backend.keeps = True

    def by(self, options: Options) -> Captured | None:
        """Return the same function by options that differ in the policy's rules for single calls alone. It takes over
        what was captured, and compiles it by that policy when it is called; None if it must be captured anew, because
        some of the code is not captured or a graph is not closed."""
        state, backend = self.state, self._backend
        closed = all(kept.is_closed for kept in backend.kept) and len(backend.kept) >= len(state.pieces) > 0
        plain = not self._wrapped and options.device is None and options.policy.autocast_device is None
        if backend.state is not state or not closed or not plain or state.not_captured or state.notes:
            return None
        other = copy.copy(self)
        other.options, other.state = options, State(calls=state.calls, handed=state.handed)
        backend.follow(options, other.state)
        if self._outside is not None:
            self._outside.follow(options, other.state)
        return other

    def _capture_anew(self) -> None:
        self._backend = Backend(self._target, self.options, self.state)
        if self._outside is not None:
            self._outside = Uncaptured(self._target, self.options, self.state, self._backend)
        self.state.forget()
        self._run = self._compile()

    def _over_limit(self, outside: Uncaptured) -> None:
        """After Dynamo has given up on code that was compiled too often, start again with dynamic sizes."""
        limit = f"the model was compiled for {dynamo.RECOMPILE_LIMIT} different shapes or values, which is the limit"
        see = "TORCH_LOGS=recompiles shows what differs between them"
        if self._dynamic is not True:
            asked = " (dynamic=False makes a graph for each shape)" if self._dynamic is False else ""
            self.state.leave(f"{limit}{asked}. From now on its graphs have dynamic sizes, as with dynamic=True. {see}")
            self._dynamic = True
            outside.make_dynamic()
            self._run = self._compile()
        else:
            self.state.leave(
                f"{limit}, even with dynamic sizes. From now on the code that differs runs as plain Python, with its "
                f"products under torch.autocast. Pass a number that changes with every call as a tensor. {see}"
            )

    @contextlib.contextmanager
    def _no_autocast(self) -> Iterator[None]:
        """Switch off a surrounding ``torch.autocast``, which capture would bake into the graph: the policy wins."""
        if not is_any_autocast_enabled():
            yield
            return
        if "autocast" not in self.state.warned:
            self.state.warned.add("autocast")
            warnings.warn(
                "A module compiled by amp_compile was called inside torch.autocast: its own policy wins, and autocast "
                "is off inside it. Call it outside of the region (in a trainer: mixed_precision='no', bf16=False or "
                "precision=32), or set compiled.enabled = False there.",
                AmpWarning,
                stacklevel=users_frame(),
            )
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _nothing_captured(self, reason: str | None) -> None:
        """Warn, once, that a call captured no graph, unless there was nothing to capture."""
        how = "unchanged" if self._outside is None else "with products under torch.autocast"
        text = f"no tensor op was captured: the model runs as plain Python, {how}"
        self.state.note(text)
        if reason is not None and "nothing" not in self.state.warned:
            self.state.warned.add("nothing")
            self.state.not_captured.append(f"the whole model: {reason}")
            warnings.warn(f"amp_compiler: {text}. {reason}.", AmpWarning, stacklevel=users_frame())


def _explain(error: Exception, fullgraph: bool) -> Exception | None:
    """Return our own error without Dynamo's wrapping, or a clear error for code that cannot be in one graph."""
    inner: BaseException | None = error
    for _ in range(8):
        if isinstance(inner, AmpError):
            return inner if inner is not error else None
        inner = getattr(inner, "inner_exception", None) or (inner.__cause__ if inner is not None else None)
    if dynamo.is_over_limit(error):
        return CaptureError(dynamo.RECOMPILE_LIMIT_REACHED)
    if dynamo.is_unsupported(error) or (fullgraph and dynamo.is_dynamo_error(error)):
        where = settings.users_line(error)
        place = f" at {where.removesuffix(': ')}" if where else ""
        return CaptureError(
            f"With fullgraph=True the model must be a single graph, but it has a graph break{place} "
            f"({first_line(error).rstrip('. ')}).",
            source=where,
            hint="Leave fullgraph off to compile the pieces, or move that code out of forward.",
        )
    return None

