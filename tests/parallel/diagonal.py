"""The cases that ``make test`` runs, by one torchrun of two ranks for all modules; the rest is ``distributed``."""

from __future__ import annotations

DIAGONAL: dict[str, tuple[str, ...]] = {
    "cases_data": (
        "gradients fp16", "gradients bf16", "gradients accumulated", "gradients without a scaler",
        "gradients in small buckets", "gradients in pieces", "gradients sent in bf16", "overflow",
        "overflow accumulated", "overflow in pieces", "flush", "used in the first micro-batch only",
        "another width", "another level", "another black list", "another batch",
    ),
    "cases_low": ("data", "sharded", "resumed", "DDP", "refused", "disagreement"),
    "cases_calibrate": ("together", "failing"),
    "cases_networks": ("checkpointed fp16", "curves bf16"),
    "cases_checkpoint": ("tied bf16", "profiled", "overflow accumulated", "broken", "again"),
    "cases_sharded_state": ("frozen", "written", "used later", "explained"),
    "cases_wrapped": (
        "step Sequential DDP bfloat16", "forward class around FSDP2 float16", "forward class FSDP2 auto",
        "forward class FSDP2 with a policy bfloat16", "overflow FSDP2", "shards", "tensor Sequence float16",
    ),
}  # fmt: skip
