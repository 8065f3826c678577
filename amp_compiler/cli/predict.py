"""``amp-compiler predict``: will mixed precision pay, on which device, at which level, and why?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..common.errors import ArgumentError
from . import common as c

if TYPE_CHECKING:
    from ..cost.device import Device
    from ..prediction import Prediction

NAME = "predict"
HELP = "Predict how long a model takes on devices that need not be here, in fp32 and at each level, from shapes alone."
EXAMPLES = (
    "amp-compiler predict model.py:make --device a100_80,h100_sxm --levels all",
    "amp-compiler predict model.py:make --device t4 --inference --json",
    "amp-compiler predict model.py:make --device v100_sxm2 --inference --plot roofline.svg",
)
EPILOG = c.examples(EXAMPLES)

_COLUMNS = ("device", "level", "ms", "speed-up", "band", "fp32 ms", "TF32 ms", "GB", "of fp32's", "waits for")


@dataclass(frozen=True)
class Asked:
    """What is to be predicted."""

    target: str
    inputs: list[str]
    devices: str | list[Device]
    levels: str = "O2"
    dtype: str = ""
    training: bool = True
    optimizer: str = "adamw"
    backend: str = "eager"
    world_size: int = 1


def run(
    target: c.Target,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAMES",
            show_default=False,
            help="Devices by name (a100_80), TOML files, or this_machine; several with commas.",
        ),
    ],
    levels: Annotated[
        str, typer.Option("--levels", "-l", metavar="LEVELS", help="Levels, several with commas, or all.")
    ] = "O2",
    dtype: c.Dtype = "",
    inference: Annotated[bool, typer.Option("--inference", help="Predict an inference, not a training step.")] = False,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw, momentum, sgd or none.")] = "adamw",
    backend: Annotated[
        str, typer.Option("--backend", help="eager, or inductor: element-wise ops of a chain as one kernel.")
    ] = "eager",
    world_size: Annotated[
        int, typer.Option("--world-size", metavar="N", help="Data-parallel processes, whose gradients are summed.")
    ] = 1,
    inputs: c.Inputs = [],  # noqa: B006
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw a roofline as SVG.", show_default=False)
    ] = None,
    as_json: c.Json = False,
    output: c.Output = None,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    asked = Asked(target, inputs, device, levels, dtype, not inference, optimizer, backend, world_size)
    found = list(predictions(asked, quiet))
    if plot is not None:
        from ..inspect.render.roofline import svg

        drawn = found[0].device
        c.write(svg(drawn, {p.level: p.low.graph for p in found if p.device is drawn}), plot, quiet)
    if as_json:
        c.write(json.dumps([one.to_json() for one in found], indent=1) + "\n", output, quiet)
        return
    if output is not None:
        c.write("\n".join(lines(found)) + "\n", output, quiet)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("device", "level", "waits for") else "right")
    for one in found:
        table.add_row(*cells(one))
    out = c.console()
    out.print(table)
    out.print()
    for text in verdicts(found):
        out.print(f"• {text}", markup=False, soft_wrap=True)


def advice(target: str, inputs: list[str], device: Device, quiet: bool) -> list[str]:
    """What ``doctor`` tells of a model: whether O2 pays in a training step here; nothing of one that has none."""
    from ..common.errors import AmpError

    try:
        found = list(predictions(Asked(target, inputs, [device]), quiet))
    except AmpError as error:
        return [f"No prediction: {error}"]
    return [f"Predicted: {text}" for text in verdicts(found)]


def predictions(asked: Asked, quiet: bool) -> Iterator[Prediction]:
    """One prediction for each device and level."""
    with c.progress(quiet) as tell:
        tell("loading torch")
        from ..cost.devices import find
        from ..policy import LEVELS, Policy
        from ..prediction import predict_study
        from ..study import Study
        from .target import load

        given = asked.devices.split(",") if isinstance(asked.devices, str) else asked.devices
        wanted = [find(name.strip() if isinstance(name, str) else name) for name in given if name]
        if not wanted:
            raise ArgumentError("--device needs a name, such as a100_80.")
        every = [name for name, level in LEVELS.items() if level.rewrites]
        levels = every if asked.levels == "all" else [name.strip() for name in asked.levels.split(",")]
        tell(f"loading {asked.target}")
        loaded = load(asked.target, asked.inputs)
        if loaded.model is None:
            raise ArgumentError("predict needs the model itself: a saved program has no backward and one precision.")
        with c.hushed():
            studies: dict[bool, Study] = {}
            for device in wanted:
                first = studies.get(device.is_cpu)
                for level in levels:
                    tell(f"{level} on {device.title}")
                    if first is None:
                        first = studies[device.is_cpu] = Study.of(
                            loaded.model, loaded.args, loaded.kwargs, level, asked.dtype or None, device,
                            asked.training, None, asked.optimizer, asked.backend, asked.world_size,
                        )  # fmt: skip
                    yield predict_study(first.at(Policy(level, first.policy.low)), device)


def cells(one: Prediction) -> list[str]:
    """A row of the table."""
    low, high = one.band
    tf32 = f"{one.fp32_seconds * 1e3:.3g}" if one.baseline == "tf32" else "–"
    return [
        one.device.name, one.level, f"{one.seconds * 1e3:.3g}", f"{one.speedup:.2f}", f"{low:.2f}–{high:.2f}",
        f"{one.strict_fp32_seconds * 1e3:.3g}", tf32, f"{one.memory / 1e9:.2f}", f"{one.memory / one.fp32_memory:.0%}",
        one.bound,
    ]  # fmt: skip


def lines(found: list[Prediction]) -> list[str]:
    """The table as plain text."""
    return [" | ".join(_COLUMNS), *(" | ".join(cells(one)) for one in found), "", *verdicts(found)]


def verdicts(found: list[Prediction]) -> list[str]:
    """What the table means, one sentence for each device, and what was assumed."""
    told = []
    for name in dict.fromkeys(one.device.name for one in found):
        mine = [one for one in found if one.device.name == name]
        best = max(mine, key=lambda one: one.speedup)
        told.append(f"{name}: {verdict(best)}")
        told += [f"{name}: {note}" for note in dict.fromkeys(note for one in mine for note in one.notes)]
    return told


def verdict(best: Prediction) -> str:
    """Whether mixed precision pays, and why."""
    if best.pays:
        return f"{best.level} pays, {best.speedup:.2f} times {best.baseline}'s speed: {best.reason}."
    start = f"it will not pay ({best.level}: {best.speedup:.2f} times {best.baseline}'s speed), because {best.reason}."
    batch = best.study.batch
    if batch is None:
        return start
    larger = best.pays_from
    if larger is None:
        return f"{start} It does not at 64 times the batch of {batch} either."
    return f"{start} At a batch of {larger} it does."
