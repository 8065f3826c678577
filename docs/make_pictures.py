"""Makes the pictures of the README: the HTML page in Chromium, the terminal dump as rich draws it.

    python docs/make_pictures.py        # needs Chromium and transformers
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import BertConfig, BertModel

from amp_compiler.inspect.render import html, summary, text
from amp_compiler.inspect.render.select import in_module
from amp_compiler.inspection import Inspection, inspect_model
from amp_compiler.policy import Policy

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tests"))
from chromium import Chromium  # noqa: E402

WIDTH = 124  # columns of the terminal


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=4, hidden_size=128, num_attention_heads=4, intermediate_size=512)
    model, ids = BertModel(config).eval(), torch.randint(1000, (8, 64))
    policy = Policy("O2", torch.bfloat16)
    found = inspect_model(model, (ids,), policy=policy, graph="inference", target="bert.py:make")
    page(html.page(found.stages, found.report, title=found.target, graph=found.graph), DOCS / "page.png",
         stage="insert_casts", search="encoder.layer.0.output add")  # fmt: skip
    terminal(DOCS / "dump.svg", found)


def page(content: str, picture: Path, *, stage: str, search: str) -> None:
    """A screenshot of the page at a stage, with one op found by search."""
    with tempfile.TemporaryDirectory() as folder, Chromium(1440, 860) as browser:
        path = Path(folder, "graph.html")
        path.write_text(content, encoding="utf-8")
        browser.open(path)
        browser.run(f"[...document.querySelectorAll('#stages button')].find(b => b.innerText === '{stage}').click()")
        browser.run("document.getElementById('close').click()")
        browser.click("#search")
        browser.type(search)
        browser.key("Enter")
        browser.run("document.getElementById('search').value = ''")
        browser.run("document.activeElement.blur()")
        assert browser.errors == [], browser.errors
        browser.screenshot(picture)
    print(f"{picture.name}: {picture.stat().st_size:,} bytes")


def terminal(picture: Path, found: Inspection) -> None:
    """What ``dump --module 'encoder.layer.0.*' --after insert_casts`` prints."""
    forward = found.until("insert_casts")
    lines = text.table(in_module(forward.last, "encoder.layer.0.attention.*"), WIDTH)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in [*lines, *summary.ending(forward.report, WIDTH, forward.graph)]:
        console.print(line, soft_wrap=True)
    command = "amp-compiler dump bert.py:make --module 'encoder.layer.0.attention.*'"
    drawn = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", console.export_svg(title=command), flags=re.DOTALL)
    picture.write_text(drawn.replace("Fira Code, monospace", "monospace"), encoding="utf-8")  # nothing from a network
    print(f"{picture.name}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
