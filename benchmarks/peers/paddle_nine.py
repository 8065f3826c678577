"""Paddle's nine linear layers in Paddle, by its guide to mixed precision: `auto_cast`, `decorate` at O2, `GradScaler`.

Run by `frameworks.py` with Paddle's interpreter.
"""

from __future__ import annotations

import paddle
from serve import Arrays, Step, serve

LAYERS, RATE, SCALE = 9, 1e-4, 1024


def make(variant: str, arrays: Arrays) -> Step:
    level, _, dtype = variant.partition(" ")
    size = arrays["w0"].shape[0]
    model = paddle.nn.Sequential(*(paddle.nn.Linear(size, size) for _ in range(LAYERS)))
    for number in range(LAYERS):
        model[number].weight.set_value(arrays[f"w{number}"].T.copy())  # Paddle's is [in, out]
        model[number].bias.set_value(arrays[f"b{number}"])
    x, y = paddle.to_tensor(arrays["x"]), paddle.to_tensor(arrays["y"])
    mse = paddle.nn.MSELoss()
    optimizer = paddle.optimizer.SGD(learning_rate=RATE, parameters=model.parameters())
    if level == "fp32":

        def plain() -> float:
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad(set_to_zero=False)
            return float(loss)

        return plain
    if level == "O2":
        model = paddle.amp.decorate(models=model, level="O2", dtype=dtype)
    scaler = paddle.amp.GradScaler(init_loss_scaling=SCALE)

    def mixed() -> float:
        white = {"elementwise_add"} if level == "O1" else None
        with paddle.amp.auto_cast(custom_white_list=white, level=level, dtype=dtype):
            loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad(set_to_zero=False)
        return float(loss)

    return mixed


if __name__ == "__main__":
    paddle.set_device("cpu")
    serve(make, ["fp32", "O1 bfloat16", "O2 bfloat16", "O1 float16", "O2 float16"], paddle.__version__)
