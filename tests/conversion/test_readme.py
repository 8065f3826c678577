"""The README's example of a conversion runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.read_text().split("## Convert a trained model for inference")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    assert {p.name for p in tmp_path.iterdir()} == {"model.pt2", "model.onnx"}
