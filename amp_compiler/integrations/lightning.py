"""Lightning: ``AmpPrecision``, a precision plugin for ``lightning.pytorch.Trainer`` and ``lightning.fabric.Fabric``."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ArgumentError
from ..common.keywords import names_its_keywords
from ..inspect.report import Report
from ..module import AmpMethod
from ..policy import Policy, default_dtype, dtype_name
from ..policy.ops.names import OpLike
from ..runtime.arguments import check_request
from ..runtime.methods import STEPS
from ..runtime.regions import suspended
from ..training.arguments import make_scaler, tell_of_low_parameters
from ..training.penalty import told_of_double_backward
from ..training.scaler_base import LossScaler
from ..training.update import gradients
from .lightning_loop import HeldSchedulers, Metrics, live_optimizers, unwrapped
from .lightning_steps import ModuleSteps, follow_marks
from .scaled_updates import ScaledUpdates

_BACKWARD = "self.manual_backward(loss) of the LightningModule, or fabric.backward(loss) of Fabric,"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


def _plugin_class() -> Any:
    """Return the base class of precision plugins, from the package that the program has imported, if it has. The
    Trainer's class is also Fabric's."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{name}.plugins.precision").Precision
    raise ImportError('amp_compiler.integrations.lightning needs Lightning: pip install "amp-compiler[lightning]"')


class AmpPrecision(_plugin_class()):  # type: ignore[misc]
    """Mixed precision by ``amp_compile`` for Lightning: ``Trainer(plugins=AmpPrecision(level="O2"))``, or ``Fabric``.

    ``training_step``, ``validation_step``, ``test_step`` and ``predict_step`` are compiled as a whole, and in Fabric
    ``forward`` and the methods that ``mark_forward_method`` marks, too. ``self.log`` and the other methods of Lightning
    are called outside of the graphs. The module itself is as it was after every step; with Fabric, after
    ``teardown()``.

    In fp16 the loss is scaled. Gradients are unscaled before ``on_before_optimizer_step`` and before they are clipped,
    also those of fused optimizers. A step with non-finite gradients is skipped, and schedulers with the interval
    ``"step"`` then stay where they are. Checkpoints hold the state of the scaler.

    The trainer's loggers get ``loss_scale``, ``skipped_steps`` and ``grad_norm`` (before clipping) every
    ``log_every_n_steps``.

    Args:
        level: As for ``amp_compile``.
        dtype: As for ``amp_compile``. On a CPU, fp16 is fp16 too.
        policy: As for ``amp_compile``.
        white_list: As for ``amp_compile``.
        black_list: As for ``amp_compile``.
        exclude: As for ``amp_compile``; paths begin at the module that the trainer gets. Metrics of torchmetrics are
            always excluded.
        backend: As for ``amp_compile``.
        keep_output_dtypes: As for ``amp_compile``.
        dynamic: As for ``amp_compile``.
        disable_passes: As for ``amp_compile``.
        loss_scaler: ``"dynamic"`` scales the loss in fp16 and not in bf16. A ``DynamicLossScaler``, a
            ``StaticLossScaler`` or a number for a fixed scale is used in both; None never scales.
        master_weights: How parameters that are stored in fp16 or bf16 are updated, as for ``compile_train_step``.
        log: Give ``loss_scale``, ``skipped_steps`` and ``grad_norm`` to the trainer's loggers.

    Raises:
        ArgumentError: If an argument is not valid, or the module was already compiled by ``amp_compile``.

    Examples:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from amp_compiler.integrations.lightning import AmpPrecision
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 2)
        ...     def training_step(self, batch):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), 0.1)
        >>> precision = AmpPrecision(level="O2", dtype="float16")
        >>> trainer = Trainer(plugins=precision, max_steps=2, accelerator="cpu", logger=False, barebones=True)
        >>> trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
        >>> precision.report().by_precision["float16"] > 0
        True
    """

    @names_its_keywords("AmpPrecision()")
    def __init__(
        self,
        level: str = "O2",
        dtype: torch.dtype | str | None = None,
        *,
        policy: Policy | None = None,
        white_list: Iterable[OpLike] = (),
        black_list: Iterable[OpLike] = (),
        exclude: Iterable[str | type[nn.Module]] = (),
        backend: str = "auto",
        keep_output_dtypes: bool = True,
        dynamic: bool | None = None,
        disable_passes: Iterable[str] = (),
        loss_scaler: str | float | LossScaler | None = "dynamic",
        master_weights: bool | str = True,
        log: bool = True,
    ) -> None:
        white_list, black_list, exclude = list(white_list), list(black_list), _listed(exclude)
        disable_passes = list(disable_passes)
        asked = check_request(level, dtype, policy, white_list, black_list, exclude, backend, disable_passes)
        if asked.dtype is not None and asked.policy.dtype not in (None, asked.dtype):
            raise ArgumentError(f"dtype={dtype} contradicts the policy's {asked.policy.dtype}: pass only one of them.")
        self._policy = asked.policy
        self._low = asked.policy.dtype or asked.dtype
        self._only_fp16 = loss_scaler == "dynamic"
        scaler = None if "scale_loss" in disable_passes else make_scaler(loss_scaler)
        self._updates = ScaledUpdates(scaler, master_weights, _BACKWARD)
        self._options = dict(
            level=level, dtype=dtype, policy=policy, white_list=white_list, black_list=black_list, exclude=exclude,
            backend=backend, keep_output_dtypes=keep_output_dtypes, dynamic=dynamic, disable_passes=disable_passes,
        )  # fmt: skip
        self._modules: list[ModuleSteps] = []  # a Trainer has one, Fabric may have several
        self._schedulers, self._logged = HeldSchedulers(), Metrics(log)

    # ------------------------------------------------------------------------------------------ looking

    @property
    def precision(self) -> str:
        """What ``trainer.precision`` says: ``"16-mixed"``, ``"bf16-mixed"``, or ``"32-true"`` at level O0."""
        if not self._policy.rewrites:
            return "32-true"
        return "16-mixed" if self._dtype() is torch.float16 else "bf16-mixed"

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, or None if the loss is not scaled."""
        if self._only_fp16 and self.precision != "16-mixed":
            return None
        return self._updates.scaler

    @property
    def compiled(self) -> dict[str, AmpMethod]:
        """The compiled methods by name; each has ``report()``, ``graphs`` and ``history``, as ``AmpModule`` has. With
        several modules in Fabric, the names of the second one begin with ``"1."``."""
        return {
            f"{number}.{name}" if number else name: method
            for number, steps in enumerate(self._modules)
            for name, method in steps.compiled.items()
        }

    def report(self, step: str | None = None) -> Report:
        """Report every op of a step with its precision and the reason for it, as ``AmpModule.report`` does.

        Args:
            step: ``"training_step"``, ``"validation_step"``, ``"test_step"``, ``"predict_step"`` or, with Fabric,
                ``"forward"`` or a marked method; all names are those of ``compiled``. By default the first of these
                that was captured.
        """
        compiled = self.compiled
        if not compiled:
            raise ArgumentError("There is nothing to report yet: no step has run.")
        if step is not None and step not in compiled:
            raise ArgumentError(f"There is no report of {step!r}: these have run: {', '.join(compiled)}.")
        order = sorted(compiled, key=lambda name: (*STEPS[:1], "forward", *STEPS[1:], name).index(name))
        report: Report = compiled[step or next((n for n in order if compiled[n].graphs), order[0])].report()
        return report

    def metrics(self) -> dict[str, float]:
        """Return ``loss_scale`` and ``skipped_steps``, as the trainer's loggers get them. Waits for the device."""
        scaler = self.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        return {"loss_scale": scale, "skipped_steps": float(self._updates.skipped)}

    def __repr__(self) -> str:
        low = "None" if self._low is None else dtype_name(self._low)
        return f"AmpPrecision(level={self._policy.level!r}, dtype={low})"

    # ------------------------------------------------------------------------------------------ the module

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Check the module and, with Fabric, compile its methods in place."""
        steps = next((known for known in self._modules if known.module is module), None)
        steps = steps or ModuleSteps(module, self._options)
        steps.begin()
        if self._trainer_of(module) is not None:
            self._modules = [steps]
        else:
            if steps not in self._modules:
                self._modules.append(steps)
                if self._updates.weights.method is not False:
                    for optimizer in live_optimizers(module):  # their state may be loaded before the first step
                        self._updates.weights.attach(optimizer)
                if module.training:
                    tell_of_low_parameters(module, self._updates.weights.method, self._low)
            steps.install()
            follow_marks()
        return module

    def compile_marked(self, module: nn.Module, name: str) -> None:
        """Compile a method of a module of Fabric that was marked by ``mark_forward_method``."""
        for steps in self._modules:
            if steps.module is module:
                steps.mark(name)

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Check what is going to be trained."""
        if optimizers:
            tell_of_low_parameters(model, self._updates.weights.method, self._low)
        for optimizer in optimizers:
            self._updates.weights.attach(optimizer)
        for optimizer in optimizers if self.scaler is not None else ():
            self._updates.check(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    def train_step_context(self) -> contextlib.AbstractContextManager[None]:
        return self._train_step()

    def val_step_context(self) -> contextlib.AbstractContextManager[None]:
        return self._modules[-1].replaced("validation_step")

    def test_step_context(self) -> contextlib.AbstractContextManager[None]:
        return self._modules[-1].replaced("test_step")

    def predict_step_context(self) -> contextlib.AbstractContextManager[None]:
        return self._modules[-1].replaced("predict_step")

    @contextlib.contextmanager
    def _train_step(self) -> Generator[None, None, None]:
        self._schedulers.release()
        steps = self._modules[-1]
        with steps.replaced("training_step"):
            yield
        if not steps.is_automatic:
            self._log_metrics(steps.module)

    def teardown(self) -> None:
        """Put everything back: the module's methods, with Fabric, and schedulers that waited."""
        for steps in self._modules:
            steps.remove()
        self._schedulers.release()
        self._logged.forget()
        self._updates.end()

    # ------------------------------------------------------------------------------------------ backward

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        if self._trainer_of(module) is None:
            return None
        with suspended():
            self._updates.begin_backward(module.trainer.optimizers)
            tensor = super().pre_backward(tensor, module)  # hooks get the loss as it is
            with self._updates.scaling():
                return self._scaled(tensor)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with suspended(), told_of_double_backward(), self._updates.scaling():
            if self._trainer_of(model) is not None:
                super().backward(tensor, model, *args, **kwargs)
                return
            self._updates.begin_backward()
            self._scaled(tensor).backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: nn.Module | None) -> Any:
        return None if self._trainer_of(module) is None else super().post_backward(tensor, module)

    def _scaled(self, loss: Tensor) -> Tensor:
        scaler = self.scaler
        return loss if scaler is None else scaler.scale(loss)

    # ------------------------------------------------------------------------------------------ updates

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Take the optimizer's step, or skip it if a gradient is not finite."""
        if model is None:  # Fabric tells of its optimizers only here
            self._updates.weights.attach(unwrapped(optimizer))
        with suspended():
            if self.scaler is None:
                result = self._plain_step(optimizer, model, closure, **kwargs)
            else:
                result = self._scaled_step(optimizer, model, closure, **kwargs)
            if model is not None and model.automatic_optimization:
                self._log_metrics(model)
            return result

    def _plain_step(self, optimizer: Any, model: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        if closure is not None and self._updates.weights.takes(optimizer):  # gradients are there before the step begins
            result = closure()
            if model is not None:
                self._after_closure(model, optimizer)
            with self._updates.weights.updating(optimizer):
                optimizer.step(**kwargs)
            return result
        with self._updates.weights.updating(optimizer):
            return self._own_step(optimizer, model, closure, **kwargs)

    def _own_step(self, optimizer: Any, model: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        if model is not None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        return optimizer.step(**kwargs) if closure is None else optimizer.step(closure=closure, **kwargs)

    def _scaled_step(self, optimizer: Any, model: Any, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        self._updates.check(optimizer)
        result = closure() if closure is not None else None
        self._updates.unscale(optimizer)
        if model is not None:
            self._after_closure(model, optimizer)
        self._updates.step(optimizer, **kwargs)
        if model is not None and model.automatic_optimization:
            self._hold_schedulers(model.trainer)
            self._updates.finish()
        return result

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if self._logged.wanted(model.trainer) and (grads := gradients(optimizer)):
            self._logged.note(grads)
        super()._after_closure(model, optimizer)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, if that was not done since the last step.

        In manual optimization, call it before you read or clip gradients yourself; ``self.clip_gradients`` does it.
        """
        if self.scaler is not None:
            self._updates.unscale(unwrapped(optimizer))

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.unscale_gradients(optimizer)
        super().clip_gradients(optimizer, *args, **kwargs)

    @property
    def step_was_skipped(self) -> bool:
        """True if a gradient was not finite in the last step of an optimizer, so that it was skipped. Waits for the
        device. In manual optimization, ask before you move a scheduler."""
        return self._updates.last_was_skipped

    def _hold_schedulers(self, trainer: Any) -> None:
        """After a skipped step, have the loop pass over schedulers that move with steps, until the next one begins."""
        configs = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
        if configs and self.step_was_skipped:
            self._schedulers.hold(configs)

    # ------------------------------------------------------------------------------------------ checkpoints and logs

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scaler, the number of skipped steps, and the state of the random generator of
        ``master_weights="stochastic"``; empty if there is none of these."""
        scaler, rounding = self.scaler, self._updates.weights.state_dict()
        kept: dict[str, Any] = {"rounding": rounding} if rounding else {}
        if scaler is None:
            return kept
        self._updates.finish()
        return {**scaler.state_dict(), "skipped_steps": int(self._updates.skipped), **kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or the state of a ``torch.amp.GradScaler``."""
        scaler, state = self.scaler, dict(state_dict)
        if rounding := state.pop("rounding", None):
            self._updates.weights.load_state_dict(rounding)
        if scaler is None or not state:
            return
        skipped = int(state.pop("skipped_steps", 0))
        self._updates.end()
        scaler.load_state_dict(state)
        self._updates.skipped = skipped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue with the scale of a checkpoint that was made with ``precision="16-mixed"``."""
        if type(self).__qualname__ not in checkpoint and "MixedPrecision" in checkpoint:
            self.load_state_dict(checkpoint["MixedPrecision"])

    def _log_metrics(self, model: Any) -> None:
        if self._logged.wanted(model.trainer):
            self._logged.send(model.trainer, self.metrics())

    # ------------------------------------------------------------------------------------------ internals

    def _dtype(self) -> torch.dtype:
        """The low-precision dtype. By default it depends on the device, so it is known when the module is there."""
        if self._low is not None:
            return self._low
        found = next((p for steps in self._modules for p in steps.module.parameters()), None)
        return default_dtype("cuda" if found is None and torch.cuda.is_available() else getattr(found, "device", "cpu"))

    def _trainer_of(self, module: Any) -> Any:
        """The Trainer that this is the plugin of; None with Fabric."""
        trainer = getattr(module, "_trainer", None)
        return trainer if getattr(trainer, "precision_plugin", None) is self else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_modules": []}


def _listed(exclude: Any) -> Any:
    """``exclude`` as a list, so that it can be read more than once; what isn't a list is left to the check."""
    return exclude if isinstance(exclude, (str, type)) or not isinstance(exclude, Iterable) else list(exclude)
