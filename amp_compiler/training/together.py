"""The start of a training step that several processes run: they agree on what they run, and on the first values."""

from __future__ import annotations

from typing import Any

import torch

from ..parallel.engine import Engine
from ..policy import Policy
from .owner import Owner
from .scaler_base import LossScaler


def start_together(
    engine: Engine, owner: Owner, policy: Policy, scaler: LossScaler | None, accumulate_steps: int, max_norm: Any,
    master_weights: bool | str, health_every: int | None,
) -> None:  # fmt: skip
    """Compare what every process was given, then take over the parameters and buffers of the first one."""
    from ..parallel.agreement import fingerprint
    from ..parallel.data import DataEngine
    from ..parallel.sharded import ShardEngine

    trained, state = owner.named_trained(), owner.state()
    tensors = {**trained, **state}
    described = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    facts = {
        "torch": torch.__version__,
        "level": str(policy.level),
        "dtype": str(policy.low),
        "the policy": fingerprint(policy.to_toml()),
        "the model": f"{len(tensors)} parameters and buffers (fingerprint {fingerprint(', '.join(described))})",
        "accumulate_steps": str(accumulate_steps),
        "max_grad_norm": str(max_norm),
        "master_weights": str(master_weights),
        "health_every": str(health_every),
        "loss_scaler": "None" if scaler is None else f"{type(scaler).__name__} at {scaler.get_scale():g}",
        "the optimizer": type(owner.optimizer).__name__,
        **{f"tensor {i}": text for i, text in enumerate(described)},
    }
    if isinstance(engine, ShardEngine):
        engine.begin(list(state.values()), owner.named_parameters(), owner.modules(), owner.optimizer, facts)
    elif isinstance(engine, DataEngine):
        engine.begin(list(tensors.values()), facts)
