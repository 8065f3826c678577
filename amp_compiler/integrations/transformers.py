"""Transformers: ``AmpTrainer``, a ``Trainer`` in mixed precision, and ``AmpMixin`` for trainers derived from it.

All mixed precision of ``Trainer`` is Accelerate's, so the loss scaler goes into its accelerator. The model is the
user's own: its forward is replaced while ``train``, ``evaluate`` or ``predict`` runs, and put back afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainerCallback

from ..common.errors import ArgumentError
from ..common.keywords import check_keywords
from ..compile import amp_compile
from ..inspect.report import Report
from ..module import AmpModule
from ..training.arguments import tell_of_low_parameters
from ..training.scaler_base import LossScaler
from .accelerate import arm, low_dtype
from .inplace import InPlaceForward, installed

_ROUNDING_FILE = "amp_rounding.pt"  # in a checkpoint: the random generator of amp_master_weights="stochastic"

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # what the mixin is mixed into
else:
    _Trainer = object


class AmpMixin(_Trainer):
    """Mixed precision for a class derived from ``transformers.Trainer``: ``class Mine(AmpMixin, Seq2SeqTrainer)``.

    The arguments that it adds, and what it does, are those of ``AmpTrainer``.
    """

    def __init__(
        self,
        *args: Any,
        amp_level: str = "O2",
        amp_dtype: torch.dtype | str | None = None,
        amp_loss_scaler: str | float | LossScaler | None = "dynamic",
        amp_master_weights: bool | str = True,
        amp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_keywords(f"{type(self).__name__}()", kwargs, *_constructors(type(self)))
        check_keywords("amp_options", amp_options or {}, amp_compile)
        self._amp_asked = {"level": amp_level, "dtype": amp_dtype, **(amp_options or {})}
        self._amp_loss_scaler, self._amp_master_weights = amp_loss_scaler, amp_master_weights
        self._amp_forward: InPlaceForward | None = None
        self._amp_depth = 0
        super().__init__(*args, **kwargs)
        self.add_callback(_LowerModel(self))
        self._amp_for(self.model)  # an argument that isn't valid shows here, and not when training begins

    # ------------------------------------------------------------------------------------------ what Trainer calls

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        name = getattr(args, "mixed_precision", "no")  # of bf16=True, fp16=True or ACCELERATE_MIXED_PRECISION
        if name != "no":
            dtype = "float16" if name == "fp16" else "bfloat16"
            raise ArgumentError(
                f"TrainingArguments({name}=True) would run the model under torch.autocast as well: leave {name} out "
                f"(and ACCELERATE_MIXED_PRECISION), and pass amp_dtype=torch.{dtype}."
            )
        super().create_accelerator_and_postprocess()
        if args.n_gpu > 1:
            raise ArgumentError(
                f"One process with {args.n_gpu} GPUs means torch.nn.DataParallel, which copies the model in each call: "
                "start one process per GPU with torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        self._amp_low = low_dtype(self.accelerator, self._amp_asked["dtype"], self._amp_asked.get("policy"))
        arm(self.accelerator, self._amp_low, self._amp_loss_scaler, self._amp_master_weights)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._amp_session():
            return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._amp_lower()  # again: a callback may have unwrapped the model with keep_fp32_wrapper=False
        return super().training_step(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._amp_session():
            self._amp_lower()
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        updates = self.accelerator.amp_updates
        if "loss" in logs and updates.scaler is not None:
            logs = {**logs, "loss_scale": updates.scaler.get_scale(), "skipped_steps": updates.skipped}
        super().log(logs, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save and (rounding := self.accelerator.amp_updates.weights.state_dict()):
            torch.save(rounding, os.path.join(output_dir, _ROUNDING_FILE))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = None if checkpoint is None else os.path.join(checkpoint, _ROUNDING_FILE)
        if path is not None and os.path.isfile(path):
            self.accelerator.amp_updates.weights.load_state_dict(torch.load(path, weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self.accelerator.scaler is not None:  # transformers 5.22 loads the file, if there is one, into None too
            super()._load_scaler(checkpoint)

    # ------------------------------------------------------------------------------------------ mixed precision

    @property
    def amp_module(self) -> AmpModule:
        """The compiled form of the model, with ``report()``, ``graphs`` and ``history``."""
        return self._amp_for(self.model).compiled

    def amp_report(self) -> Report:
        """Report every op that ran so far, with its precision and the reason for it."""
        report: Report = self.amp_module.report()
        return report

    def _amp_for(self, model: Any) -> InPlaceForward:
        forward = self._amp_forward
        if (present := installed(model)) is not None and present is not forward:
            return present  # of ``prepare``, or of another trainer that runs now
        if forward is None or forward.module is not model or not forward.fits:
            forward = self._amp_forward = InPlaceForward(model, **{**self._amp_asked, "dtype": self._amp_low})
        return forward

    def _amp_lower(self) -> None:
        """Replace the forward of the model, until the call of the trainer that is running returns or raises."""
        self._amp_for(self.accelerator.unwrap_model(self.model, keep_torch_compile=False)).install()

    @contextlib.contextmanager
    def _amp_session(self) -> Iterator[None]:
        self._amp_depth += 1
        try:
            yield
        finally:
            self._amp_depth -= 1
            if self._amp_depth == 0:
                self.accelerator.amp_updates.unwatch()
                if self._amp_forward is not None:
                    self._amp_forward.remove()


class AmpTrainer(AmpMixin, Trainer):
    """A ``transformers.Trainer`` that trains and evaluates in mixed precision.

    It takes all arguments of ``Trainer``, and a few more. ``train``, ``evaluate`` and ``predict`` run the model in low
    precision; the model stays your own object, and its forward is put back when they return or raise. Logs get
    ``loss_scale`` and ``skipped_steps`` where the loss is scaled, and ``grad_norm`` is that of the unscaled gradients.
    Checkpoints hold the state of the loss scaler.

    Args:
        args: The arguments of ``Trainer``, without ``TrainingArguments(bf16=True)`` or ``fp16=True``.
        amp_level: How much runs in low precision, as for ``amp_compile``.
        amp_dtype: The low-precision dtype, by default fp16 on CUDA and bf16 elsewhere.
        amp_loss_scaler: ``"dynamic"``, a ``DynamicLossScaler`` or ``StaticLossScaler``, a number for a fixed scale, or
            None. ``"dynamic"`` scales only in fp16.
        amp_master_weights: How parameters that are stored in fp16 or bf16 are updated, as the argument
            ``master_weights`` of ``compile_train_step``.
        amp_options: Other keyword arguments of ``amp_compile``: ``policy``, ``black_list``, ``exclude`` and so on.
        kwargs: The keyword arguments of ``Trainer``.

    Raises:
        ArgumentError: If an argument isn't valid, or the trainer would run the model under ``torch.autocast`` as well.
        ParallelError: If the trainer uses DeepSpeed, FSDP or XLA.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from transformers import TrainingArguments
        >>> from amp_compiler.integrations.transformers import AmpTrainer
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 2)
        ...     def forward(self, x, labels):
        ...         return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}
        >>> data = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 8
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        ...     logging_strategy="no")
        >>> trainer = AmpTrainer(Model(), args, train_dataset=data, amp_level="O2", amp_dtype="bfloat16")
        >>> trainer.train().global_step
        {...}
        3
        >>> trainer.amp_report().by_precision["bfloat16"]
        1
    """


def _constructors(cls: type) -> Iterator[Callable[..., Any]]:
    """The constructors that keyword arguments of ``cls`` may be for: the mixin's, up to one that passes none on."""
    classes = cls.__mro__[cls.__mro__.index(AmpMixin) :]
    for function in (c.__dict__["__init__"] for c in classes if "__init__" in c.__dict__):
        yield function
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return


class _LowerModel(TrainerCallback):
    """Replaces the model's forward when all that changes the model is done, and before the first batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logged = [entry["skipped_steps"] for entry in state.log_history if "skipped_steps" in entry]
        self._trainer.accelerator.amp_updates.skipped = logged[-1] if logged else 0  # those of a run that is resumed
        tell_of_low_parameters(self._trainer.model, self._trainer._amp_master_weights, self._trainer._amp_low)
        self._trainer._amp_lower()
