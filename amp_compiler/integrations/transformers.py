"""Transformers: ``AmpTrainer``, a ``Trainer`` in mixed precision, and ``AmpMixin`` for trainers derived from it.

All mixed precision of ``Trainer`` is Accelerate's, so the loss scaler goes into its accelerator. The model is the user's
own: its forward is replaced while ``train``, ``evaluate`` or ``predict`` runs, and put back afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ..common.errors import ArgumentError
from ..inspect.report import Report
from ..module import AmpModule
from ..training.scaler_base import LossScaler
from .accelerate import arm, low_dtype
from .inplace import InPlaceForward


class AmpMixin:
    """Mixed precision for a class derived from ``transformers.Trainer``: ``class Mine(AmpMixin, Seq2SeqTrainer)``.

    The arguments that it adds, and what it does, are those of ``AmpTrainer``.
    """

    def __init__(
        self,
        *args: Any,
        amp_level: str = "O2",
        amp_dtype: torch.dtype | str | None = None,
        amp_loss_scaler: str | float | LossScaler | None = "dynamic",
        amp_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._amp_asked = {"level": amp_level, "dtype": amp_dtype, **(amp_options or {})}
        self._amp_loss_scaler = amp_loss_scaler
        self._amp_forward: InPlaceForward | None = None
        self._amp_depth = 0
        super().__init__(*args, **kwargs)
        self.add_callback(_LowerModel(self))
        if self.model_init is None:
            self._amp_for(self.model)  # an argument that isn't valid shows here, and not when training begins

    # ------------------------------------------------------------------------------------------ what Trainer calls

    def create_accelerator_and_postprocess(self) -> None:
        args = self.args
        for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            if getattr(args, name, False):
                raise ArgumentError(
                    f"TrainingArguments({name}=True) would run the model under torch.autocast as well: leave {name} "
                    f"out (and ACCELERATE_MIXED_PRECISION), and pass amp_dtype=torch.{dtype}."
                )
        super().create_accelerator_and_postprocess()
        if args.n_gpu > 1:
            raise ArgumentError(
                f"One process with {args.n_gpu} GPUs means torch.nn.DataParallel, which copies the model in each call: "
                "start one process per GPU with torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        self._amp_low = low_dtype(self.accelerator, self._amp_asked["dtype"], self._amp_asked.get("policy"))
        arm(self.accelerator, self._amp_low, self._amp_loss_scaler)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._amp_session():
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._amp_session():
            self._amp_lower()
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        updates = self.accelerator.amp_updates
        if "loss" in logs and updates.scaler is not None:
            logs = {**logs, "loss_scale": updates.scaler.get_scale(), "skipped_steps": updates.skipped}
        super().log(logs, *args, **kwargs)

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
        return self.amp_module.report()

    def _amp_for(self, model: nn.Module) -> InPlaceForward:
        forward = self._amp_forward
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
            if self._amp_depth == 0 and self._amp_forward is not None:
                self._amp_forward.remove()


class AmpTrainer(AmpMixin, Trainer):
    """A ``transformers.Trainer`` that trains and evaluates in mixed precision."""


class _LowerModel(TrainerCallback):
    """Replaces the model's forward when all that changes the model is done, and before the first batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._amp_lower()
