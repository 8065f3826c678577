"""``AmpPrecision`` with several processes, in a new process, with PEFT, and under Lightning's other names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.lightning_modules import Classifier, loader, make_trainer
from integrations.lightning_worker import run
from integrations.trainer_loops import make_batches, make_model, own_loop
from torch import nn

from amp_compiler.integrations.lightning import AmpPrecision

pytestmark = pytest.mark.trainers
WORKER = Path(__file__).with_name("lightning_worker.py")


def start(*command: object) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_two_processes_are_low_and_agree(tmp_path: Path) -> None:
    start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", WORKER, "ddp", tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert first["world"] == 2
    assert first["linear"] == second["linear"] == ["float16"] * len(first["linear"]) != []
    assert same(first["weights"], second["weights"])
    assert not any(g.isfinite().all() for g in first["gradients"][0])  # the other process's overflow is everybody's
    assert same(first["gradients"][1:], second["gradients"][1:])
    assert first["metrics"] == second["metrics"] == {"loss_scale": 2.0**15, "skipped_steps": 1.0}
    assert first["held"] == second["held"] == []


def test_a_run_continues_in_a_new_process_bit_for_bit(tmp_path: Path) -> None:
    straight = run(tmp_path, 2)
    assert straight["scaler"]["skipped_steps"] > 0
    assert straight["scheduler"]["last_epoch"] == 8 - straight["scaler"]["skipped_steps"]
    start(WORKER, "resume", tmp_path, next(tmp_path.glob("epoch=0*")))
    assert same(torch.load(tmp_path / "resumed.pt"), straight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_equals_our_own_loop_bit_for_bit(dtype: torch.dtype) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        base = make_model()
        torch.manual_seed(3)
        return get_peft_model(base, LoraConfig(r=2, target_modules=["inward", "up"], init_lora_weights=False))  # type: ignore[arg-type]

    class Adapted(Classifier):
        def __init__(self) -> None:
            super().__init__(lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2))
            self.net = adapted()  # type: ignore[assignment]

    batches, module, precision = make_batches(10), Adapted(), AmpPrecision(dtype=dtype)
    make_trainer(precision, gradient_clip_val=1.0).fit(module, loader(batches))
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    own = own_loop(model, optimizer, batches, dtype=dtype, clip=1.0)
    for name, weight in module.net.named_parameters():
        assert torch.equal(weight, own.weights[name]), name
    assert precision.report().low_flops_share == 1.0


@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn"])
def test_under_the_name_pytorch_lightning(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(strategy=strategy, devices=2 if strategy == "ddp_spawn" else 1))
    start(script)


SCRIPT = '''
import pytorch_lightning, torch, sys
from lightning_fabric import Fabric
from amp_compiler.integrations.lightning import AmpPrecision

class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    precision, model = AmpPrecision(dtype="float16"), Model()
    before = model.layer.weight.detach().clone()
    trainer = pytorch_lightning.Trainer(plugins=precision, max_steps=2, accelerator="cpu", devices={devices},
                                        strategy="{strategy}", logger=False, enable_checkpointing=False)
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    assert not torch.equal(before, model.layer.weight)
    if "{strategy}" == "auto":
        assert precision.report().by_precision["float16"] == 1
        fabric = Fabric(accelerator="cpu", devices=1, plugins=AmpPrecision(dtype="bfloat16"))
        assert fabric.setup(torch.nn.Linear(4, 2))(torch.ones(1, 4)).dtype is torch.float32
    assert "lightning.pytorch" not in sys.modules
'''
