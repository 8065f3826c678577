"""``amp-compiler convert``: convert an fp32 model into a mixed-precision file."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import ArgumentError
from ..common.files import check_writable
from . import common as c
from .data import Data, Kinds, load_batches, relative_error
from .search import by_error

if TYPE_CHECKING:
    from ..conversion.converted import ConvertedModel

NAME = "convert"
HELP = "Convert a model for inference and save it as an ordinary torch.export archive (and as ONNX)."
EXAMPLES = (
    "amp-compiler convert model.py:make --level O2 --dtype bfloat16 -o model.pt2",
    "amp-compiler convert model.py:make --tolerance 0.01 --data model.py:batches -o measured.pt2",
    "amp-compiler convert model.py:Net --input 8*x16 --dtype float16 --json -o net.pt2",
)
EPILOG = c.examples(EXAMPLES)


def run(
    target: c.Target,
    inputs: c.Inputs = [],  # noqa: B006
    level: c.Level = "O2",
    dtype: c.Dtype = "",
    output: c.Output = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", metavar="FILE", help="Also write an ONNX file.", show_default=False)
    ] = None,
    policy: c.PolicyFile = None,
    low: c.WhiteList = [],  # noqa: B006
    fp32: c.BlackList = [],  # noqa: B006
    exclude: c.Exclude = [],  # noqa: B006
    cast_params: Annotated[
        bool, typer.Option("--cast-params/--keep-params", help="Store weights in the precision in which they are used.")
    ] = True,
    keep_io: Annotated[
        bool, typer.Option("--keep-io/--low-io", help="Inputs and outputs keep the dtypes of the fp32 model.")
    ] = True,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", show_default=False,
            help="Search for the policy with the most low-precision work whose outputs on --data differ from fp32 "
            "by at most this much, as a share (0.01 is 1 %, an SNR of 40 dB). Starts from O3 in float16 unless --level "
            "and --dtype say otherwise.",
        ),
    ] = None,
    data: Data = "",
    disable: c.Disable = [],  # noqa: B006
    full: Annotated[bool, typer.Option("--full", help="Print every op with its reason, not a summary.")] = False,
    as_json: c.Json = False,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    if output is None and onnx is None:
        raise ArgumentError("There is no output file: add -o model.pt2 or --onnx model.onnx.")
    for path in (output, onnx):
        if path is not None:
            check_writable(path)
    if (tolerance is None) != (not data):
        raise ArgumentError("--tolerance needs --data to measure on, and --data needs --tolerance.")
    if tolerance is not None and (policy or low or fp32 or exclude):
        raise ArgumentError("--tolerance searches for a policy: omit --policy, --low, --fp32 and --exclude.")
    request = c.Request(target, inputs, level, dtype, policy, low, fp32, exclude, disable=tuple(disable))
    with c.progress(quiet) as tell, contextlib.ExitStack() as stack:
        tell("loading torch")
        from ..calibration.refusal import kinds
        from ..conversion.convert import convert_model
        from ..inspection import check_call
        from ..runtime.arguments import call_arguments
        from .target import load

        tell(f"loading {target}")
        loaded = load(target, inputs, needs_inputs=not data)
        if loaded.model is None:
            raise ArgumentError(f"{target} is a saved program already: pass the model that it was made from.")
        model = stack.enter_context(c.eval_mode(loaded.model))
        stack.enter_context(c.hushed())
        batches = load_batches(data) if data else []
        if batches and not loaded.args and not loaded.kwargs:
            loaded.args, loaded.kwargs = call_arguments(batches[0][0])
        else:
            check_call(model, loaded.args, loaded.kwargs)
        if tolerance is None:
            chosen = request.policy_for(model)
        else:
            example = kinds(model, loaded.args, loaded.kwargs)
            metric = relative_error(model, batches, example)
            tell("exporting")  # a model that cannot be exported is told before the search
            plain = convert_model(model, loaded.args, loaded.kwargs, "O0", dynamic_shapes=loaded.dynamic_shapes)
            _check_shapes(plain, model, batches, example)
            searched = by_error(model, batches, metric, tolerance, level, dtype, tell)
            chosen = searched.policy
        tell("converting")
        converted = convert_model(
            model, loaded.args, loaded.kwargs, chosen.level, policy=chosen, cast_params=cast_params,
            keep_io_dtypes=keep_io, dynamic_shapes=loaded.dynamic_shapes, disable_passes=disable,
        )  # fmt: skip
        if tolerance is not None:
            error = metric(converted)
            if not error <= tolerance:
                raise ArgumentError(
                    f"The converted program's error on the data is {error:.3g}, above the tolerance: nothing was "
                    "written. Use a larger tolerance."
                )
        if output is not None:
            tell(f"writing {output}")
            converted.save(output)
        if onnx is not None:
            tell(f"writing {onnx}")
            converted.to_onnx(onnx)
        tell("comparing with fp32")
        found = summary(converted, model, loaded.args, loaded.kwargs)
        if tolerance is not None:
            found |= {"data_error": error, "evaluations": searched.evaluations, "fp32_ops": dict(searched.reasons)}
    for name, path in (("file", output), ("onnx", onnx)):
        if path is not None:
            found[name], found[f"{name}_bytes"] = str(path), path.stat().st_size
    if as_json:
        c.write(json.dumps(found, indent=1), None)
    elif not quiet:
        c.show(_lines(found, converted, full, c.console().width))


def _check_shapes(plain: ConvertedModel, model: Any, batches: Sequence[Any], example: Kinds) -> None:
    """Raise if the exported program does not take a batch that the model takes: its sizes are those of the example
    inputs, apart from those that may change."""
    import torch

    from ..calibration.refusal import kinds
    from ..common.torch_names import pytree
    from ..runtime.arguments import call_arguments

    for number, (inputs, _) in enumerate(batches, 1):
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, call_arguments(inputs))
        try:
            plain(*args, **kwargs)
        except Exception as error:  # torch.export raises several classes
            given = kinds(model, args, kwargs).items()
            differ = [f"{name} is {text}, but {example.get(name, 'absent')}" for name, text in given
                      if example.get(name) != text]  # fmt: skip
            if not differ:
                raise
            raise ArgumentError(
                f"The exported program does not take batch {number} of the data: {', '.join(differ)} in the example "
                "inputs. Give --input the sizes of the data, with * after those that may change (8*x16)."
            ) from error


def summary(converted: ConvertedModel, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Summarize a conversion: weights, ops by precision, and the largest error against fp32 on the example inputs."""
    import torch

    from ..common.torch_names import pytree

    def floats(values: Any) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(values)
        return [v.detach().double() for v in leaves if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def called(net: Any) -> list[torch.Tensor]:
        own_args, own_kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (tuple(args), dict(kwargs)))
        return floats(net(*own_args, **own_kwargs))  # a model may write to its inputs

    with torch.no_grad():
        wanted = called(model)
    given = called(converted)
    error = signal = noise = 0.0
    for a, b in zip(wanted, given, strict=True):
        error = max(error, float((a - b).abs().max()) if a.numel() else 0.0)
        signal, noise = signal + float(a.square().sum()), noise + float((a - b).square().sum())
    report = converted.report()
    return {
        "level": report.level, "dtype": report.dtype,
        "fp32_bytes": converted.details.fp32_bytes, "stored_bytes": converted.details.stored_bytes,
        "by_precision": dict(report.by_precision), "casts": report.casts, "low_flops_share": report.low_flops_share,
        "largest_error": error, "snr_db": 10 * math.log10(signal / noise) if signal and noise else None,
        "notes": list(report.notes),
    }  # fmt: skip


def _lines(found: dict[str, Any], converted: ConvertedModel, full: bool, width: int) -> list[Any]:
    from rich.text import Text

    from ..inspect.render import summary
    from ..inspect.render.words import size

    share = found["stored_bytes"] / max(found["fp32_bytes"], 1)
    snr = "equal in every bit" if found["snr_db"] is None else f"SNR {found['snr_db']:.1f} dB"
    lines = [
        Text(f"{found[name]}: {size(found[name + '_bytes'])}", style="bold")
        for name in ("file", "onnx") if name in found
    ]  # fmt: skip
    lines.append(Text(f"weights: {size(found['fp32_bytes'])} → {size(found['stored_bytes'])} ({share:.0%})"))
    lines.append(Text(f"against fp32 on the example inputs: largest error {found['largest_error']:.3g}, {snr}"))
    if "data_error" in found:
        lines.append(Text(f"on the data: error {found['data_error']:.3g}, found in {found['evaluations']} evaluations"))
        lines += [Text(f"  {name}: {why}") for name, why in found["fp32_ops"].items()]
    report = converted.report()
    return [*lines, Text(), *(summary.full(report, width) if full else summary.lines(report, width, hint=False))]
