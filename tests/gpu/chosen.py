"""The cases that ``make test`` runs, all in one process; the others are marked zoo. Each takes less than a second."""

from __future__ import annotations

#: every level, dtype and optimizer once, and every kind of layer
STEPS = ("dense-O2-fp16-adamw", "conv_bn-O1-bf16-sgd", "masked_attention-torch-fp16-sgd", "unet-auto-fp16-adamw",
         "embedding-O3-bf16-adamw", "graph_break-O2-bf16-adamw")  # fmt: skip
#: training steps in which the host must not wait, and in which it must
WAITS = ("fused", "clipped", "unfused", "reads")
#: products with the launches of each: K is split, or not
SHAPES = {"square": 1, "few rows": 2, "batch": 1, "ragged": 1, "layer": 1}
PARITY = ("dense fp16", "conv_bn bf16")
CONVERTED = ("conv_bn",)
#: the kernel that torch takes for a call, by compute capability: fp32 attention has an efficient one only
ATTENTION = {"plain O2 90": "cudnn", "causal O1 80": "flash", "masked O2 80": "efficient", "plain O0 90": "efficient"}
INDUCTOR = ("chain fp16",)

CHOSEN = {
    "cases_steps": (*STEPS, *WAITS),
    "cases_device": (
        *(f"parity {name}" for name in PARITY), "scaler fp16", *(f"product {s} fp16" for s in SHAPES),
        *(f"convert {name}" for name in CONVERTED), *(f"attention {name}" for name in ATTENTION),
        "gradients", "skip", "data parallel", "which attention 80", "which attention 90", "layer of 16 rows",
        "layer of 65536 rows",
    ),
    "cases_inductor": INDUCTOR,
}  # fmt: skip
