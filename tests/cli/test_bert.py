"""A user's file with a BERT from ``transformers``: every format at every level."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch
from typer.testing import Result

from amp_compiler.cli.dump import FORMATS, render
from amp_compiler.cli.target import load
from amp_compiler.inspect.render.json import schema
from amp_compiler.inspection import inspect_model
from amp_compiler.policy import Policy
from helpers import LEVELS

BERT = """
from transformers import BertConfig, BertModel


def make():
    return BertModel(BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64))
"""


@pytest.fixture(scope="module")
def bert(user_folder: Path) -> str:
    (user_folder / "bert.py").write_text(BERT)
    return str(user_folder / "bert.py:make")


def test_a_model_brings_its_own_inputs(bert: str, run: Callable[..., Result]) -> None:
    """``transformers`` models have some; the others are given."""
    done = run("dump", bert, "--module", "encoder.layer.0.attention.*", "--exclude", "encoder.layer.0.output", "-q")
    assert done.exit_code == 0, done.output
    assert "encoder.layer.0.attention.self.query  Linear" in done.stdout


@pytest.mark.parametrize("level", LEVELS)
def test_every_format(level: str, bert: str) -> None:
    loaded = load(bert, ["2x8:int64:100"])
    assert loaded.model is not None
    policy = Policy(level, torch.float16 if level == "O1" else torch.bfloat16)
    found = inspect_model(loaded.model.eval(), loaded.args, policy=policy, capture="export")
    for form in FORMATS:
        if form == "svg" and shutil.which("dot") is None:
            continue  # Graphviz is not installed: tests/render/test_forms.py has the message
        text = render(found, form)
        assert "layer_norm" in text, form
        if form == "json":
            document = json.loads(text)
            jsonschema.validate(document, schema())
            low = {n["precision"] for n in document["nodes"] if n["op"] == "linear"}
            assert low == {"float32"} if level == "O0" else low <= {"float16", "bfloat16"}
