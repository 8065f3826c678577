"""MindSpore's network for handwritten digits in MindSpore, by its guide: `auto_mixed_precision`, `DynamicLossScaler`,
the whole step under `ms.jit`.

Run by `frameworks.py` with MindSpore's interpreter.
"""

from __future__ import annotations

import os

import mindspore as ms
from mindspore import nn
from mindspore.amp import DynamicLossScaler, all_finite, auto_mixed_precision
from serve import Arrays, Step, serve

RATE = 1e-2


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layers = nn.SequentialCell(
            nn.Dense(28 * 28, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10)
        )

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.layers(self.flatten(x))


def make(variant: str, arrays: Arrays) -> Step:
    level, _, dtype = variant.partition(" ")
    model = Network()
    for number in range(3):
        dense = model.layers[2 * number]
        dense.weight.set_data(ms.Tensor(arrays[f"w{number}"]))
        dense.bias.set_data(ms.Tensor(arrays[f"b{number}"]))
    model.set_train()
    x, y = ms.Tensor(arrays["x"]), ms.Tensor(arrays["y"].astype("int32"))
    parameters = model.trainable_params()
    if level != "fp32":
        model = auto_mixed_precision(model, level, getattr(ms, dtype))
    loss_fn, optimizer = nn.CrossEntropyLoss(), nn.SGD(parameters, RATE)
    scaler = DynamicLossScaler(scale_value=2**16, scale_factor=2, scale_window=50)

    def forward(data: ms.Tensor, label: ms.Tensor) -> ms.Tensor:
        loss = loss_fn(model(data), label)
        return loss if level == "fp32" else scaler.scale(loss)

    gradients = ms.value_and_grad(forward, None, parameters)

    @ms.jit
    def step(data: ms.Tensor, label: ms.Tensor) -> ms.Tensor:
        loss, grads = gradients(data, label)
        if level == "fp32":
            optimizer(grads)
        else:
            loss = scaler.unscale(loss)
            finite = all_finite(grads)
            if finite:
                optimizer(scaler.unscale(grads))
            scaler.adjust(finite)
        return loss

    return lambda: float(step(x, y).asnumpy())


if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU", runtime_num_threads=int(os.environ["OMP_NUM_THREADS"]))
    serve(make, ["fp32", "O1 bfloat16", "O2 bfloat16", "O1 float16", "O2 float16"], ms.__version__)
