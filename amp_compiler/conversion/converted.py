"""``ConvertedModel``: the result of ``convert_model`` and ``load_converted``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.export import ExportedProgram

from ..common.torch_names import pytree
from ..inspect.report import Report
from ..policy import Policy
from ..rewrite.records import Record
from . import archive, onnx
from .details import Details
from .fp32_form import Fp32Form, StoredFp32Form
from .inputs import Inputs
from .running import Running


class ConvertedModel:
    """A mixed-precision program for inference, made by ``convert_model`` and ``load_converted``.

    Call it as the model that it was made from, with inputs of the same dtypes; no gradient is recorded. The attribute
    ``exported_program`` is what ``save`` writes: pure ATen, weights included, with outputs as plain tuples and dicts. A
    call runs a copy of it in memory, which may use kernels of this package where they are faster.
    Where these are not compiled, fp32 copies of the stored low-precision weights are kept for speed: ``cached_bytes``
    is their size.

    Examples:
        >>> import tempfile, torch
        >>> from amp_compiler import convert_model, load_converted
        >>> x = torch.ones(3, 4)
        >>> converted = convert_model(torch.nn.Linear(4, 2).eval(), (x,), dtype=torch.bfloat16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     converted.save(f"{folder}/model.pt2")
        ...     again = load_converted(f"{folder}/model.pt2")
        >>> torch.equal(again(x), converted(x))
        True
    """

    def __init__(
        self, program: ExportedProgram, details: Details, original: Fp32Form | StoredFp32Form,
        history: list[Record], *, out_spec: Any = None,
    ) -> None:  # fmt: skip
        self.exported_program = program
        self.details = details
        self.history = history
        self.fp32_form = original
        self._out_spec = out_spec if out_spec != program.call_spec.out_spec else None
        self._cache_weights = True
        self._inputs = Inputs(program)
        self._running: Running | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs for these inputs, in the classes that the model returns. No gradient is recorded."""
        flat = self._inputs.check(args, kwargs)
        if self._running is None:
            self._running = Running(
                self.exported_program, self.policy, self.details.disable_passes, self._cache_weights, self.history
            )
        result = self._running(args, kwargs, flat)
        if self._out_spec is None:
            return result
        return pytree.tree_unflatten(pytree.tree_leaves(result, is_leaf=lambda x: x is None), self._out_spec)

    @property
    def policy(self) -> Policy:
        """The ``Policy`` that the model was converted with."""
        return self.details.policy

    @property
    def cache_weights(self) -> bool:
        """True to keep fp32 copies of weights where the CPU computes in fp32. False saves memory and costs time."""
        return self._cache_weights

    @cache_weights.setter
    def cache_weights(self, value: bool) -> None:
        if value != self._cache_weights:
            self._cache_weights, self._running = value, None

    @property
    def cached_bytes(self) -> int:
        """The size in bytes of the fp32 copies of weights that calls have made so far."""
        return self._running.cached_bytes if self._running is not None else 0

    def report(self) -> Report:
        """Report every op with its precision and reason, the totals, and what stayed in fp32."""
        return self.details.report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``torch.export`` archive to ``path``, for ``load_converted`` and ``torch.export.load``. The file is
        replaced as a whole or not at all.
        """
        archive.write(path, self.exported_program, self.details, self.fp32_form)

    def to_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write an ONNX model with its low-precision weights to ``path``. Needs ``pip install amp-compiler[onnx]``."""
        onnx.write(path, self.exported_program)

    def remove_casts(self) -> Fp32Model:
        """Return the model in fp32 again, without any cast that the conversion added.

        Weights that are stored in fp32 (``cast_params=False``) have their exact values. Of the others only the rounded
        values are stored; the attribute ``rounded`` of the result names them.
        """
        program = self.fp32_form.with_values_of(self.exported_program, self.exported_program.call_spec.out_spec)
        return Fp32Model(program, self.details.rounded, self._out_spec)

    def __repr__(self) -> str:
        low = str(self.policy.low).removeprefix("torch.")
        share = self.details.stored_bytes / max(self.details.fp32_bytes, 1)
        size = f"weights {self.details.stored_bytes:,} bytes, {share:.0%} of fp32"
        return f"ConvertedModel({self.policy.level}, {low}, {size})"


class Fp32Model:
    """The result of ``remove_casts``: an fp32 program to call. ``rounded``: the paths of weights that are not exact."""

    def __init__(self, program: ExportedProgram, rounded: tuple[str, ...], out_spec: Any = None) -> None:
        self.exported_program = program
        self.rounded = rounded
        self._inputs = Inputs(program)
        self._module, self._out_spec = program.module(), out_spec

    @property
    def exact(self) -> bool:
        """True if every weight has the value that it had before the conversion."""
        return not self.rounded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._inputs.check(args, kwargs)
        with torch.no_grad():
            result = self._module(*args, **kwargs)
        if self._out_spec is None:
            return result
        return pytree.tree_unflatten(pytree.tree_leaves(result, is_leaf=lambda x: x is None), self._out_spec)

    def __repr__(self) -> str:
        how = "exact" if self.exact else f"{len(self.rounded)} weights rounded"
        return f"Fp32Model({how})"


