"""``calibrate``: run a model in fp32 on some batches and measure every value."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..capture.dynamo import with_own_code
from ..common.errors import AmpError, AmpWarning, CalibrationError
from ..common.messages import users_frame
from ..common.torch_names import no_autocast, pytree
from ..policy import Policy, check_low_dtype, dtype_name
from ..policy.scopes import original_of
from ..runtime.arguments import call_arguments, split_batch
from ..runtime.backend import Backend
from ..runtime.captured import Captured
from ..runtime.options import Options
from ..runtime.state import Piece, State
from ..training.owner import Holder
from ..training.probe import is_float
from ..training.rerun import undisturbed
from ..training.results import check_loss, check_loss_fn, split
from .calibration import Calibration
from .ranks import are_several, over_ranks
from .recorder import Recorder
from .refusal import kinds, loss_refusal, refusal
from .scale import best_scale, with_scale

#: batches that are taken from a source that does not say how many it has
MOST_BATCHES = 128


def calibrate(
    model: Callable[..., Any],
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    dtype: torch.dtype | str = torch.float16,
    scale: float | None = None,
    all_ranks: bool = True,
) -> Calibration:
    """Run a model in fp32 and measure the range of every value, of its gradient, and how much rounding it matters.

    The model is captured as by ``amp_compile`` and run op by op. Its parameters, gradients, buffers and the random
    generators are as before afterwards. It runs in the mode that it is in, so call ``model.eval()`` first to calibrate
    for inference.

    Args:
        model: A module or a function, in fp32.
        batches: An iterable of ``(inputs, targets)`` as a training step takes them: inputs are a tensor, a tuple of
            arguments or a dict of keyword arguments. A tensor or a dict by itself is a batch without targets. All of
            the batches are run; if the source has no length, at most 128 of them, with a warning if there are more.
            Bound a longer or endless source by ``itertools.islice(batches, n)``, and wrap it in a progress bar such as
            tqdm to see one.
        loss_fn: A function of ``(output, targets)``, as for ``compile_train_step``. None if the model returns the loss
            itself, or for inference: without a scalar loss no gradients are recorded, and sensitivities are those of
            the model's outputs, to changes in directions chosen at random.
        dtype: The low-precision dtype in question, ``torch.float16`` or ``torch.bfloat16``.
        scale: The loss scale that gradients are multiplied by before they are judged. None stands for the power of two
            that suits them best (1 for bf16).
        all_ranks: If ``torch.distributed`` is initialized, every process calls ``calibrate``, each with its own
            batches, and gets the calibration over the batches of all of them. False: of this process alone.

    Returns:
        A ``Calibration``, with one row per op.

    Raises:
        CalibrationError: If there is no batch, if the model or the loss cannot be called with one (the error says which
            input it is, its shape and the expected one), or if another process failed.

    Examples:
        >>> import torch
        >>> from amp_compiler import calibrate
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> with torch.no_grad():
        ...     _ = model[0].weight.fill_(30000.0)
        >>> found = calibrate(model, [torch.ones(2, 4)])
        >>> [(row.op, row.module) for row in found.rows if row.overflow]
        [('linear', '0'), ('relu', '1')]
    """
    return run_calibration(model, batches, loss_fn, dtype, scale, all_ranks)


def run_calibration(
    model: Any, batches: Iterable[Any], loss_fn: Any, dtype: torch.dtype | str, scale: float | None = None,
    all_ranks: bool = True, example: Mapping[str, str] = MappingProxyType({}),
) -> Calibration:  # fmt: skip
    """Calibrate a model; the arguments are those of ``calibrate``. ``example``: the ``kinds`` of inputs that the model
    is known to take, for the error if it does not take a batch."""
    low = check_low_dtype(dtype)
    model = _checked(model, loss_fn, scale)
    gathers = all_ranks and are_several()
    try:
        found = _measure(model, batches, loss_fn, low, 1.0 if scale is None else float(scale), example)
    except Exception:  # the other processes wait for this one's rows: they are told, and the error goes on
        if gathers:
            with contextlib.suppress(CalibrationError):
                over_ranks(None)
        raise
    if gathers:
        found = over_ranks(found)
    return with_scale(found, best_scale(found)) if scale is None and found.has_gradients else found


def _measure(
    model: Any, batches: Iterable[Any], loss_fn: Callable[[Any, Any], Any] | None, low: torch.dtype, scale: float,
    example: Mapping[str, str],
) -> Calibration:  # fmt: skip
    holder = Holder(model, loss_fn)
    held = frozenset(id(where[name]) for where, name in holder.attributes())
    recorder = Recorder(low, scale, held)
    run = _Run(model, loss_fn, recorder)
    count, known, where = 0, example, "in the example inputs"
    with undisturbed(holder, _device(model)), _some_gradient(model):
        for batch in _bounded(batches):
            count += 1
            recorder.next_batch()
            inputs, targets = split_batch(batch, count, CalibrationError)
            args, kwargs = call_arguments(inputs)
            try:
                run(args, kwargs, targets)
            except AmpError:
                raise
            except Exception as error:
                refused = refusal(model, args, kwargs, count, known, where)
                if refused is None and loss_fn is not None:
                    refused = loss_refusal(model, loss_fn, args, kwargs, targets, count)
                if refused is not None:
                    raise refused from refused.__cause__
                error.add_note(f"This was in batch {count} of the calibration.")
                raise
            known, where = kinds(model, args, kwargs), f"in batch {count}"
    if count == 0:
        raise CalibrationError(
            "The source of batches is empty: pass at least one (inputs, targets). A generator can be used only once."
        )
    if not recorder.entries:
        given = ", ".join(f"{name} is {text}" for name, text in known.items())
        raise CalibrationError(f"No op of the model was captured with any values, so nothing was measured: {given}.")
    run.warn()
    name = type(model).__name__ if isinstance(model, nn.Module) else ""
    rows = recorder.rows(run.has_gradients, run.has_loss)
    return Calibration(rows, low, scale, count, name, run.has_loss)


class _Backend(Backend):
    """Gives every captured graph to the recorder instead of differentiating and compiling it."""

    def __init__(self, target: Any, options: Options, state: State, recorder: Recorder) -> None:
        super().__init__(target, options, state)
        self.recorder = recorder

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        self.state.pieces.append(Piece(graph, [], (0, 0)))
        return lambda *args: self.recorder.run(graph, args)


class _Run:
    """Runs one batch, forward and backward."""

    def __init__(self, model: Any, loss_fn: Any, recorder: Recorder) -> None:
        self.model, self.loss_fn, self.recorder = model, loss_fn, recorder
        self.has_loss, self.has_gradients = loss_fn is not None, False
        self.not_a_number: list[str] = []  # batches with NaN in their loss or outputs, in words
        options, state = Options(Policy("O0", recorder.dtype), backend="eager"), State()
        self.captured = Captured(self._function(), model, options, state, _Backend(model, options, state, recorder))
        self.generator = torch.Generator().manual_seed(0)

    def _function(self) -> Callable[..., Any]:
        model, loss_fn = self.model, self.loss_fn

        def run(args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Any:
            output = model(*args, **kwargs)
            return output if loss_fn is None else split(loss_fn(output, targets), from_model=False)[0]

        return with_own_code(run)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> None:
        with torch.enable_grad(), no_autocast():
            result = self.captured(args, kwargs, targets)
            if self.loss_fn is not None:
                check_loss(result, self.loss_fn)
                outputs = [result]
            else:
                outputs = self._outputs(result)
            if any(bool(t.isnan().any()) for t in outputs):
                self._note(args, kwargs)
            outputs = [t for t in outputs if t.requires_grad]
            leaves = [t for t in (*_parameters(self.model), *_parameters(self.loss_fn)) if t.requires_grad]
            leaves += [t for t in pytree.tree_leaves((args, kwargs)) if is_float(t) and t.requires_grad]
            leaves += self.recorder.leaves
            if not outputs or not leaves:
                return
            directions = [torch.ones_like(t) if self.has_loss else self._random(t) for t in outputs]
            torch.autograd.grad(outputs, leaves, directions, allow_unused=True)
            self.has_gradients = True

    def _note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember a batch that gives NaN, and whether it has NaN itself."""
        bad = any(is_float(t) and bool(t.isnan().any()) for t in pytree.tree_leaves((args, kwargs)))
        self.not_a_number.append(f"batch {self.recorder.batch}{', which has NaN in its inputs,' if bad else ''}")

    def warn(self) -> None:
        """Warn about what cannot be measured."""
        if self.not_a_number:
            what = "the loss" if self.has_loss else "the model's output"
            more = f" (and of {len(self.not_a_number) - 1} more)" if len(self.not_a_number) > 1 else ""
            warnings.warn(
                f"amp_compiler: in fp32, {what} of {self.not_a_number[0]}{more} is NaN. Values and gradients that are "
                "NaN are in no range and in no sensitivity: leave these batches out, or correct the model.",
                AmpWarning, stacklevel=users_frame(),
            )  # fmt: skip

    def _outputs(self, result: Any) -> list[Tensor]:
        """Return the loss that the model returned, or else all its floating-point outputs."""
        loss, _ = split(result, from_model=True)
        if isinstance(loss, Tensor) and loss.is_floating_point() and loss.dim() == 0:
            self.has_loss = True
            return [loss]
        self.has_loss = False
        return [t for t in pytree.tree_leaves(result) if is_float(t)]

    def _random(self, like: Tensor) -> Tensor:
        """Return signs at random: the expected square of their product with a change is that change's squared norm."""
        signs = torch.randint(0, 2, like.shape, generator=self.generator) * 2 - 1
        return signs.to(like.device, like.dtype)


def _checked(model: Any, loss_fn: Any, scale: Any) -> Any:
    if isinstance(model, type) or not callable(model):
        raise CalibrationError(f"calibrate takes a torch.nn.Module or a function, not {model!r}.")
    check_loss_fn(loss_fn)
    floats = {p.dtype for p in _parameters(model) if p.is_floating_point()}
    if floats and floats <= {torch.float16, torch.bfloat16}:
        raise CalibrationError(
            f"The parameters of the model are {' and '.join(sorted(map(dtype_name, floats)))}: they are rounded "
            "already. calibrate measures the fp32 model; load that, or call model.float()."
        )
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < float(scale) < float("inf")):
        raise CalibrationError(f"scale must be a positive number or None, not {scale!r}.")
    return original_of(model) if isinstance(model, nn.Module) else model


def _bounded(batches: Any) -> Iterator[Any]:
    """Yield the batches; of a source that does not say how many it has, no more than ``MOST_BATCHES``."""
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            f"batches must be an iterable of (inputs, targets), not {type(batches).__name__}: for a single batch write "
            "[(inputs, targets)]."
        )
    try:
        known = len(batches)  # type: ignore[arg-type]
    except TypeError:
        known = None
    source = iter(batches)
    yield from itertools.islice(source, MOST_BATCHES if known is None else known)
    if known is None and next(source, None) is not None:
        warnings.warn(
            f"amp_compiler: the source of batches does not say how many there are, and has more than {MOST_BATCHES}: "
            f"the calibration is of the first {MOST_BATCHES}. Choose how many by itertools.islice(batches, n), or pass "
            "a list or a loader with a length.",
            AmpWarning, stacklevel=users_frame(),
        )  # fmt: skip


def _parameters(target: Any) -> Iterator[Tensor]:
    return target.parameters() if isinstance(target, nn.Module) else iter(())


def _device(model: Any) -> torch.device:
    return next((p.device for p in _parameters(model)), torch.device("cpu"))


@contextlib.contextmanager
def _some_gradient(model: Any) -> Iterator[None]:
    """Let the parameters of a model that is frozen as a whole have gradients, for the sensitivities."""
    frozen = [p for p in _parameters(model) if p.is_floating_point()]
    if any(p.requires_grad for p in frozen):
        frozen = []
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
