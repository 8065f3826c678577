"""``amp_compile``: a model in fp32 in, the same model in mixed precision out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import fx, nn

from . import graph as g
from . import pipeline
from .capture import dynamo
from .errors import AmpError, AmpWarning, ArgumentError, BannedOpError, CaptureError, PolicyError
from .ops.names import OpLike
from .passes.base import Context
from .policy import Policy, check_level, check_low_dtype, default_dtype, dtype_name, matches
from .report import Report, Row, build_report, cast_totals, graph_rows
from .scopes import Surroundings, inside_call, marked_modules, modules_of
from .verify import deep_by_default, verify

BACKENDS = ("auto", "eager", "inductor")


@dataclass(frozen=True)
class Options:
    """The checked arguments of one ``amp_compile`` call."""

    policy: Policy
    backend: str = "auto"
    keep_output_dtypes: bool = True
    dynamic: bool | None = None
    fullgraph: bool = False
    disable_passes: tuple[str, ...] = ()


@dataclass
class Piece:
    """One captured graph: the rewritten forward, its rows, and what its executed form costs."""

    graph: fx.GraphModule
    rows: list[Row]
    casts: tuple[int, int]


@dataclass
class State:
    """Everything that capturing adds; a fresh one for each compiled module."""

    pieces: list[Piece] = field(default_factory=list)
    history: list[pipeline.Record] = field(default_factory=list)
    not_captured: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    entered: Surroundings = field(default_factory=Surroundings.now)  # the regions around the call that is running

    def missed(self, reasons: Iterable[str]) -> None:
        """Graph breaks that no captured graph tells of, as when the code before them had no tensor op."""
        for reason in reasons:
            if not any(reason in known for known in self.not_captured):
                self.not_captured.append(f"graph break: {reason}")

    def leave(self, text: str) -> None:
        """Something runs without us: a note in the report and a warning, once each."""
        if text not in self.notes:
            self.notes.append(text)
            warnings.warn(f"amp_compile: {text}", AmpWarning, stacklevel=3)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class AmpModule(nn.Module):
    """What ``amp_compile`` returns: behaves as the original module and runs in mixed precision.

    Parameters, buffers and submodules are the original's own objects, so ``state_dict()`` has the original's
    keys and any optimizer works. ``enabled = False`` runs the original.
    """

    _OWN = ("enabled", "training", "_original", "_options", "_state", "_compiled", "_modules", "_parameters",
            "_buffers", "_is_function", "_ready")  # fmt: skip

    def __init__(self, target: Callable[..., Any], options: Options) -> None:
        is_function = not isinstance(target, nn.Module)
        object.__setattr__(self, "_ready", False)
        super().__init__()
        object.__setattr__(self, "_original", target)
        object.__setattr__(self, "_is_function", is_function)
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_state", State())
        object.__setattr__(self, "_compiled", None)
        object.__setattr__(self, "enabled", True)
        if isinstance(target, nn.Module):
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                object.__setattr__(self, name, getattr(target, name))
        object.__setattr__(self, "_ready", True)

    # ------------------------------------------------------------------------------------------- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return self._original(*args, **kwargs)
        if self._compiled is None:
            backend = _Backend(self._original, self._options, self._state)
            compiled = dynamo.compile_frame(
                self._original, backend, dynamic=self._options.dynamic, fullgraph=self._options.fullgraph
            )
            object.__setattr__(self, "_compiled", compiled)
        before, pieces = dynamo.Tally.now(), len(self._state.pieces)
        with self._no_autocast(), dynamo.capture_settings(), inside_call() as surroundings:
            self._state.entered = surroundings
            if self._state.entered.scopes:
                self._state.leave("a precision scope acts inside a model's code; around a call of it, it does nothing")
            try:
                result = self._compiled(*args, **kwargs)
            except Exception as error:
                self._state.warned.add("raised")
                explained = _explain(error, self._options.fullgraph)
                if explained is None:
                    raise
                raise explained from error
        if Surroundings.now().opened > self._state.entered.opened and "scope" not in self._state.warned:
            self._state.warned.add("scope")
            why = "; ".join(before.breaks_since()) or "see not_captured in the report"
            self._state.leave(
                "a precision scope has a graph break inside it, and Dynamo then leaves the function that holds it as "
                "plain Python: its own ops run in fp32, what it calls inside the scope is compiled for the scope's "
                f"precision. Move the break out of the scope, or mark a module by set_precision. The break: {why}"
            )
        if not self._state.pieces:
            self._nothing_captured(before.skipped_since("raised" in self._state.warned))
        elif len(self._state.pieces) > pieces:
            self._state.missed(before.breaks_since())
        return result

    @contextlib.contextmanager
    def _no_autocast(self) -> Iterator[None]:
        """The policy wins over a surrounding ``torch.autocast``, which capture would bake into the graph."""
        if not torch._C._is_any_autocast_enabled():
            yield
            return
        if "autocast" not in self._state.warned:
            self._state.warned.add("autocast")
            warnings.warn(
                "An amp_compile'd module was called inside torch.autocast: its own policy wins, autocast is off "
                "inside it. Take the module out of the region, or set compiled.enabled = False there.",
                AmpWarning,
                stacklevel=4,
            )
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _nothing_captured(self, reason: str | None) -> None:
        """A call went by and there is no graph: fine if there was nothing to capture, else say so, once."""
        text = "no tensor op was captured: the model runs as plain Python, in the precision it has"
        self._state.note(text)
        if reason is not None and "nothing" not in self._state.warned:
            self._state.warned.add("nothing")
            self._state.not_captured.append(f"the whole model: {reason}")
            warnings.warn(f"amp_compile: {text}. {reason}.", AmpWarning, stacklevel=4)

    # ------------------------------------------------------------------------------------------- looking

    @property
    def original(self) -> Any:
        """The module or function that was compiled, untouched."""
        return self._original

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        policy: Policy = self._options.policy
        return policy

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten forward graphs, one for each piece and each re-compilation."""
        return [piece.graph for piece in self._state.pieces]

    @property
    def history(self) -> list[pipeline.Record]:
        """Every stage of every graph: name, seconds, modified, text."""
        return list(self._state.history)

    def report(self, graph: int | None = None) -> Report:
        """Every op with its precision and why, over all graphs captured so far (or one of them)."""
        state: State = self._state
        pieces = state.pieces if graph is None else [state.pieces[graph]]
        notes = list(state.notes)
        if not state.pieces and not notes:
            notes.append("nothing captured yet: call the model once with example inputs")
        return build_report(
            (row for piece in pieces for row in piece.rows), (piece.casts for piece in pieces),
            level=self.policy.level, dtype=self.policy.low, not_captured=state.not_captured, notes=notes,
        )  # fmt: skip

    # ----------------------------------------------------------------------------- behaving as a module

    @property
    def training(self) -> bool:
        """The original's mode."""
        return bool(getattr(self._original, "training", False)) if self._ready else True

    @training.setter
    def training(self, mode: bool) -> None:
        if self._ready and not self._is_function:
            self._original.training = mode

    def train(self, mode: bool = True) -> AmpModule:
        if not self._is_function:
            self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return (
            super().state_dict(*args, **kwargs)
            if self._is_function
            else self._original.state_dict(*args, **kwargs)
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_function:
            return super().load_state_dict(*args, **kwargs)
        return self._original.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in AmpModule._OWN:
            raise AttributeError(name)
        found = getattr(self._original, name)
        if isinstance(found, types.MethodType) and found.__self__ is self._original and not self._is_function:
            return self._calling_compiled(found)
        return found

    def _calling_compiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the original (``generate``) that finds the compiled forward when it calls the model."""
        original: nn.Module = self._original

        @functools.wraps(original.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            here = original.__dict__.pop("forward")  # the compiled model calls the original's own
            try:
                return self(*args, **kwargs)
            finally:
                original.__dict__["forward"] = here

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            hooked = original._forward_hooks or original._forward_pre_hooks  # they would run twice
            if not self.enabled or hooked or "forward" in original.__dict__:
                return method(*args, **kwargs)
            original.__dict__["forward"] = forward
            try:
                return method(*args, **kwargs)
            finally:
                original.__dict__.pop("forward", None)

        return run

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AmpModule._OWN or not self.__dict__.get("_ready", False) or self._is_function:
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        twin = AmpModule(copy.deepcopy(self._original, memo), self._options)
        twin.enabled = self.enabled
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return AmpModule, (self._original, self._options), {"enabled": self.enabled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.enabled = state["enabled"]

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A decorated method is bound like any other; a compiled module in a class body is just a value."""
        return self if instance is None or not self._is_function else types.MethodType(self, instance)

    def __repr__(self) -> str:
        policy = self.policy
        return f"amp_compile(level={policy.level!r}, dtype={dtype_name(policy.low)})({self._original!r})"


class AmpMethod:
    """A compiled method of a module. No module itself, so that ``model.forward = amp_compile(model.forward)`` sets an
    attribute (nn.Module would file another module away as a child, and go on calling the class's forward)."""

    def __init__(self, compiled: AmpModule) -> None:
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_compiled":
            raise AttributeError(name)
        return getattr(self._compiled, name)

    def __repr__(self) -> str:
        return repr(self._compiled)


# -------------------------------------------------------------------------------------------- the backend


class _Backend:
    """What Dynamo calls with each graph: lower, run the passes, differentiate, give back a callable."""

    def __init__(self, target: Any, options: Options, state: State) -> None:
        self.target, self.options, self.state = target, options, state
        self.forward, _, _ = pipeline.build(options.disable_passes)
        self.__name__ = "amp_compiler"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        known = len(self.state.history)
        try:
            return self.compile(gm, example_inputs)
        except Exception:
            del self.state.history[known:]  # Dynamo may start over; what it threw away is no history
            raise

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from .capture.lower import why_not

        reason = dynamo.break_reason(gm)
        if reason is not None and str(reason) not in self.state.not_captured:
            self.state.not_captured.append(str(reason))
        refused = why_not(gm)
        if refused is not None:
            self.state.leave(f"a graph runs in the precision it has: {refused}")
            self.state.not_captured.append(f"a graph: {refused}")
            return gm.forward
        with _guarded(
            self.state, "a graph could not be rewritten and runs in the precision it has"
        ) as rewritten:
            graph = self.rewrite(gm, example_inputs)
        if not rewritten:
            return gm.forward
        with _guarded(self.state, "AOTAutograd could not take a graph; its casts run unfolded") as compiled:
            result = self.run(graph, example_inputs)
        if not compiled:
            self.state.pieces.append(Piece(graph, graph_rows(graph, len(self.state.pieces)), cast_totals(graph)))
        return result if compiled else graph.forward

    def rewrite(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        from .capture.lower import lower

        start = time.perf_counter()
        modules = modules_of(self.target)
        paths: dict[int, str] = {}
        for path, module in modules.items():
            paths.setdefault(id(module), path)
        graph = lower(gm, example_inputs, self.options.policy, paths)
        graph.meta[g.STATE] = dynamo.kept_values(gm, example_inputs)
        ctx = Context(
            self.options.policy,
            self.options.keep_output_dtypes,
            marked_modules(modules),
            self.twin(gm, paths),
            self.around(gm),
        )
        verify(graph, ("captured",), ctx, "capture")
        history = [
            pipeline.Record("capture", time.perf_counter() - start, True, g.format_graph(graph), "forward",
                            len(graph.graph.nodes))
        ]  # fmt: skip
        self.forward.run(graph, ctx, history, graph="forward")
        self.state.history.extend(history)
        for note in ctx.notes:
            self.state.leave(note)
        return graph

    def around(self, gm: fx.GraphModule) -> tuple[str, torch.dtype | None] | None:
        """A region of the model's code that is not in the graph: Dynamo runs it as plain Python, because the graph
        breaks inside it, and compiles what is called there. Guards see a precision scope, not an autocast region."""
        if any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in gm.graph.nodes):
            return None  # this graph shows its regions
        found = self.state.entered.region_since()
        if found is not None and found[0] == "autocast":
            self.state.leave(
                "a graph break inside a torch.autocast region makes Dynamo run the region as plain Python: the code "
                "that it calls is compiled for that precision, and the same code called elsewhere may reuse it, or the "
                "other way round. Use precision(...) or set_precision instead, or move the break out of the region"
            )
        return found

    def twin(self, gm: fx.GraphModule, paths: dict[int, str]) -> fx.GraphModule | None:
        """The same frame in the low dtype, if its code can depend on dtypes (``capture/twin.py``)."""
        from .capture.twin import may_depend_on_dtype, twin_of_frame

        if self.options.policy.level == "O0" or "mark_dtype_origin" in self.options.disable_passes:
            return None
        if not may_depend_on_dtype(gm):
            return None
        try:
            return twin_of_frame(self.options.policy, paths)
        except Exception as error:
            low = dtype_name(self.options.policy.low)
            self.state.leave(f"the model's code reads dtypes and could not be traced in {low}, so every cast in it to "
                             f"float32 counts as the author's: {_first_line(error)}")  # fmt: skip
            return None

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        from .capture.autodiff import compile_graph

        piece = Piece(graph, graph_rows(graph, len(self.state.pieces)), cast_totals(graph))
        ctx = Context(self.options.policy, self.options.keep_output_dtypes)
        backend = resolve_backend(self.options.backend, example_inputs)
        _, joint_steps, inference_steps = pipeline.build(self.options.disable_passes, backend)

        def joint(differentiated: fx.GraphModule, kind: str) -> None:
            steps = joint_steps if kind == "joint" else inference_steps
            steps.run(differentiated, ctx, self.state.history, graph=kind)
            piece.casts = cast_totals(differentiated)

        compiled = compile_graph(graph, example_inputs, backend, joint)
        self.state.pieces.append(piece)
        return compiled


@contextlib.contextmanager
def _guarded(state: State, what: str) -> Iterator[list[bool]]:
    """Yields a list that is non-empty when the body went through; a failure becomes a warning and a note,
    so that a model we cannot treat runs as it did without us. Errors meant for the user go up."""
    done: list[bool] = []
    try:
        yield done
        done.append(True)
    except BannedOpError:
        raise
    except Exception as error:
        from torch._dynamo.exc import TorchDynamoException

        if isinstance(error, TorchDynamoException) or deep_by_default():
            raise
        state.leave(f"{what}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def _explain(error: Exception, fullgraph: bool) -> Exception | None:
    """Our own error out of Dynamo's wrapping, or a clear one for what cannot be in one graph."""
    import torch._dynamo.exc as exc

    inner: BaseException | None = error
    for _ in range(8):
        if isinstance(inner, AmpError):
            return inner if inner is not error else None
        inner = getattr(inner, "inner_exception", None) or (inner.__cause__ if inner is not None else None)
    if isinstance(error, exc.Unsupported) or (fullgraph and isinstance(error, exc.TorchDynamoException)):
        first = str(error).strip().splitlines()[0]
        return CaptureError(
            f"With fullgraph=True the model must be one graph, and it is not: {first} "
            "Leave fullgraph off to compile the pieces, or take that code out of forward."
        )
    return None


def resolve_backend(backend: str, inputs: Sequence[Any]) -> str:
    """``auto`` is inductor when a CUDA tensor is there, eager otherwise."""
    if backend != "auto":
        return backend
    return "inductor" if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs) else "eager"


# ------------------------------------------------------------------------------------------- the function


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
    The model itself is never changed. Without a model it is a decorator.

    >>> fast = amp_compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), level="O1")
    >>> _ = fast(torch.ones(1, 4))
    >>> fast.report().by_precision["bfloat16"]
    3
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"Unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}.")
    for name, value, allowed in (("dynamic", dynamic, (True, False, None)), ("fullgraph", fullgraph, (True, False)),
                                 ("keep_output_dtypes", keep_output_dtypes, (True, False))):  # fmt: skip
        if not any(value is choice for choice in allowed):
            raise ArgumentError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}.")
    check_level(level)
    if dtype is not None:
        dtype = check_low_dtype(dtype)
    if policy is not None and not isinstance(policy, Policy):
        raise ArgumentError(f"policy must be an amp_compiler.Policy, not {type(policy).__name__}.")
    if policy is not None and level not in ("O2", policy.level):
        raise ArgumentError(f"level={level!r} contradicts the policy's {policy.level!r}: give one of them.")
    names = tuple(pipeline.check_names(disable_passes))
    # made once for a wrong name to show at once; the decorator below may never be applied
    base = (policy or Policy(level, dtype)).with_ops(low=white_list, fp32=black_list)
    excluded = _exclusions(exclude)

    def compile_one(target: Callable[..., Any]) -> AmpModule | AmpMethod:
        if isinstance(target, (AmpModule, AmpMethod)):
            raise ArgumentError("This module is amp_compile'd already: compile module.original with the new options.")
        if isinstance(target, type) or not callable(target):
            what = f"the class {target.__name__}" if isinstance(target, type) else f"{type(target).__name__} {target!r}"
            raise ArgumentError(f"amp_compile takes a torch.nn.Module or a function, not {what}.")
        chosen = _with_excluded(_with_dtype(base, dtype, target), target, excluded)
        made = AmpModule(target, Options(chosen, backend, keep_output_dtypes, dynamic, fullgraph, names))
        of_a_module = isinstance(getattr(target, "__self__", None), nn.Module)
        return AmpMethod(made) if of_a_module else made

    return compile_one if model is None else compile_one(model)


def _with_dtype(policy: Policy, dtype: torch.dtype | None, model: Any) -> Policy:
    if dtype is not None and policy.dtype not in (None, dtype):
        raise ArgumentError(f"dtype={dtype} contradicts the policy's {policy.dtype}: give one of them.")
    return dataclasses.replace(policy, dtype=policy.dtype or dtype or default_dtype(_device(model)))


def _device(model: Any) -> str:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _exclusions(exclude: Iterable[str | type[nn.Module]]) -> list[str | type[nn.Module]]:
    if isinstance(exclude, (str, type)) or not isinstance(exclude, Iterable):
        raise ArgumentError(f"exclude must be a list of path patterns and module classes: write [{exclude!r}].")
    given = list(exclude)
    for item in given:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ArgumentError(f"exclude takes path patterns and module classes, not {item!r}.")
    return given


def _with_excluded(policy: Policy, model: Any, exclude: list[str | type[nn.Module]]) -> Policy:
    if not isinstance(model, nn.Module):
        if exclude or policy.modules:
            raise PolicyError("exclude and module rules need a torch.nn.Module: a function has no module paths.")
        return policy
    modules = modules_of(model)
    first: dict[int, str] = {}
    for path, module in modules.items():
        first.setdefault(id(module), path)  # the name under which a module that has two stands in a graph
    rules: dict[str, str] = {}
    for item in exclude:
        if isinstance(item, str):
            named = [path for path in modules if matches(item, path)]
            found = [item] if named else []
            found += [p for path in named if (p := first[id(modules[path])]) and not matches(item, p)]
        else:
            found = [path or "*" for path, module in modules.items() if isinstance(module, item)]
        if not found:
            raise PolicyError(_no_match(item, modules))
        rules.update(dict.fromkeys(found, "float32"))
    for pattern, _ in policy.modules:
        if not any(matches(pattern, path) for path in modules):
            raise PolicyError(_no_match(pattern, modules))
    return policy.with_modules(rules) if rules else policy


def _no_match(item: Any, modules: Iterable[str]) -> str:
    import difflib

    paths = [p for p in modules if p]
    if isinstance(item, type):
        return f"exclude: the model has no module of class {item.__name__}."
    near = difflib.get_close_matches(item.rstrip(".*"), paths, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else f" Paths look like: {', '.join(paths[:4]) or '(none)'}."
    return f"The module pattern {item!r} matches no module of the model.{hint}"
