"""What ``dump`` does with its options, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import Result

from amp_compiler import Policy
from amp_compiler.cli.target import DTYPES, parse_inputs
from amp_compiler.common.errors import ArgumentError
from amp_compiler.inspect.render.json import schema

Run = Callable[..., Result]


def json_of(run: Run, *args: object) -> dict[str, object]:
    done = run("dump", *args, "--json", "-q")
    assert done.exit_code == 0, done.output
    document: dict[str, object] = json.loads(done.stdout)
    jsonschema.validate(document, schema())
    return document


def test_a_summary_instead_of_every_op(run: Run, user_folder: Path) -> None:
    done = run("dump", "model.py:make", "--summary", "--level", "O1")
    assert done.exit_code == 0, done.output
    assert "level O1, bfloat16: 12 ops (" in done.stdout
    assert "2 × layer_norm in blocks.0-1.norm" in done.stdout
    assert "report.full()" not in done.stdout, "that is for Python"
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert run("dump", "model.py:make", "--summary", "--level", "O1", "-o", "summary.txt", "-q").output == ""
    assert (user_folder / "summary.txt").read_text() == done.stdout


def test_json_twice_is_json(run: Run) -> None:
    assert run("dump", "model.py:make", "--json", "-f", "json", "-q").stdout.startswith("{")


def test_converting_prints_a_summary_or_every_op(run: Run) -> None:
    short = run("convert", "model.py:make", "-o", "told.pt2", "--level", "O1")
    assert short.exit_code == 0, short.output
    assert "blocks.0-1" in short.stdout
    assert "linear_3" not in short.stdout
    full = run("convert", "model.py:make", "-o", "told.pt2", "--level", "O1", "--full")
    assert "linear_3" in full.stdout
    assert max(map(len, full.stdout.splitlines())) <= 100


def test_two_policies(run: Run, user_folder: Path) -> None:
    plain = Policy("O2", torch.bfloat16)
    plain.to_file(user_folder / "a.toml")
    plain.with_ops(fp32=["gelu"]).with_modules({"head": "float32"}).to_file(user_folder / "b.toml")
    found = json_of(run, "model.py:make", "--policy", "a.toml", "--diff", "--against", "b.toml")
    changed = {(c["node"], c["before"], c["after"]) for c in found["changed"]}  # type: ignore[attr-defined]
    assert changed == {(n, "bfloat16", "float32") for n in ("gelu", "gelu_1", "linear_4", "softmax")}
    assert found["casts_came"]


def test_a_stage_on_the_way(run: Run) -> None:
    early = json_of(run, "model.py:make", "--graph", "inference", "--after", "assign_precision")
    late = json_of(run, "model.py:make", "--graph", "inference", "--after", "insert_casts", "--level", "O1")
    assert (early["after"], early["casts"]) == ("assign_precision", 0)
    assert late["casts"] == sum(n["kind"] == "cast" for n in late["nodes"])  # type: ignore[attr-defined]


def test_what_a_pass_did(run: Run) -> None:
    found = json_of(run, "model.py:make", "--diff", "--after", "insert_casts")
    assert (found["before"], found["after"]) == ("after assign_precision", "after insert_casts")
    assert found["casts_came"]
    assert not found["changed"], "the decision was made before"


def test_lists_and_passes_by_option(run: Run) -> None:
    found = json_of(run, "model.py:make", "--fp32", "linear", "--low", "softmax", "--exclude", "blocks.1",
                    "--disable", "mark_dtype_origin")  # fmt: skip
    rows = {r["node"]: r for r in found["rows"]}  # type: ignore[attr-defined]
    assert rows["linear"]["rule"] == "black_list"
    assert rows["softmax"]["precision"] == "bfloat16"
    assert rows["gelu_1"]["rule"] == "module_rule"
    passes = {p["name"]: p for p in found["passes"]}  # type: ignore[attr-defined]
    assert passes["mark_dtype_origin"]["note"] == "switched off"


def test_a_device_places_neutral_ops(run: Run) -> None:
    found = json_of(run, "model.py:make", "--level", "auto", "--device", "a100_80", "--graph", "joint")
    rows = {r["node"]: r for r in found["rows"]}  # type: ignore[attr-defined]
    assert rows["gelu"]["rule"] == "placed"
    assert rows["gelu"]["reason"].startswith("on a100_80 float32 would cost ")
    assert rows["layer_norm"]["rule"] == "table"
    assert "place_neutral" in [p["name"] for p in found["passes"]]  # type: ignore[attr-defined]
    told = run("explain", "model.py:make", "--level", "auto", "--device", "a100_80", "--op", "gelu", "-q")
    assert "the costs of ops and casts on the device" in " ".join(told.stdout.split()), told.output
    broken = json_of(run, "model.py:breaks", "--level", "auto", "--device", "a100_80")
    assert "place_neutral" in [p["name"] for p in broken["passes"]]  # type: ignore[attr-defined]


def test_a_converted_model(run: Run, user_folder: Path) -> None:
    assert run("convert", "model.py:make", "-o", "shown.pt2", "--dtype", "float16", "-q").exit_code == 0
    stored = json_of(run, "shown.pt2")
    assert (stored["after"], stored["level"], stored["dtype"]) == ("stored", "O2", "float16")
    linear = next(n for n in stored["nodes"] if n["op"] == "linear")  # type: ignore[attr-defined]
    assert linear["precision"] == "float16"
    assert linear["reason"].startswith("a matrix product")
    runs = json_of(run, "shown.pt2", "--graph", "inference")
    assert runs["graph"] == "inference"
    assert run("dump", "shown.pt2", "--graph", "joint").exit_code == 2
    assert run("dump", "shown.pt2", "--fp32", "linear").exit_code == 2
    assert run("dump", "shown.pt2", "--device", "a100_80").exit_code == 2
    assert run("explain", "shown.pt2", "--op", "softmax", "-q").exit_code == 0


def test_a_model_that_breaks_the_graph(run: Run) -> None:
    done = run("dump", "model.py:breaks")
    assert done.exit_code == 0, done.output
    assert "note: captured by Dynamo" in done.stdout
    assert "g1.linear" in done.stdout


def test_sizes_that_may_change(run: Run) -> None:
    found = json_of(run, "model.py:Net", "--input", "8*x16")
    place = next(n for n in found["nodes"] if n["kind"] == "input")  # type: ignore[attr-defined]
    batch, width = place["values"][0]["shape"]
    assert isinstance(batch, str)
    assert width == 16


def test_quiet_is_the_result_alone(run: Run, user_folder: Path) -> None:
    done = run("dump", "model.py:make", "-f", "dot", "-o", "q.dot", "-q")
    assert (done.exit_code, done.output) == (0, "")
    assert (user_folder / "q.dot").read_text().startswith("digraph")


# ----------------------------------------------------------------------------------------------- --input

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(sizes, st.sampled_from(sorted(DTYPES)), st.integers(1, 100), st.booleans())
def test_an_input_is_what_it_says(shape: list[int], dtype: str, below: int, by_name: bool) -> None:
    text = f"{'x'.join(map(str, shape))}:{dtype}:{below}"
    args, kwargs, dynamic = parse_inputs([f"ids={text}" if by_name else text])
    value = kwargs["ids"] if by_name else args[0]
    assert (list(value.shape), value.dtype, dynamic) == (shape, DTYPES[dtype], None)
    if not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel() and dtype == "int64":
        assert 0 <= int(value.min()) <= int(value.max()) < below
    again, named, _ = parse_inputs([f"ids={text}" if by_name else text])
    torch.testing.assert_close(named["ids"] if by_name else again[0], value, rtol=0, atol=0, equal_nan=True)


@given(st.text(max_size=12))
def test_any_other_text_is_a_clear_error_or_an_input(text: str) -> None:
    message = ""
    try:
        args, kwargs, _ = parse_inputs([text])
    except ArgumentError as error:
        message = str(error)
    assert "--input" in message or len(args) + len(kwargs) == 1


@pytest.mark.parametrize("texts", [["a=2", "3"], ["2*", "m=3*"], ["2 a=3"], ["-1x2"], ["2:int64:0"], ["2:int64:1:1"]])
def test_inputs_that_cannot_be(texts: list[str]) -> None:
    with pytest.raises(ArgumentError):
        parse_inputs(texts)
