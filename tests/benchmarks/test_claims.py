"""Every measured statement of the README and of docs/ names the benchmark that shows it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmark_helpers import FOLDER, load
from claims import Paragraph, paragraphs

ROOT = Path(__file__).parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: phrases that look measured and are not, each with its reason
NO_CLAIMS = {
    "its 95 % interval": "how to read a table",
    "takes 1.2 times the time of fp32": "how to read a table",
    "which is faster": "how to read a table",
    "for Adam 8 bytes per parameter": "the sizes of two fp32 numbers",
    "Gradients are fp32 until the update is made, 4 bytes": "the size of an fp32 number",
    "need 2 and 4 bytes less per parameter": "the sizes of dtypes",
    "is used only where a cast and a product of the library would not be faster": "a rule, by an estimate",
    "says that this is not slower": "a rule, by an estimate",
    "where it should not be slower": "a rule, by an estimate",
}


def documented() -> list[tuple[str, Paragraph]]:
    """Every paragraph of every page, with the page's name."""
    return [(page.name, paragraph) for page in PAGES for paragraph in paragraphs(page.read_text())]


def table() -> dict[str, str]:
    """The claims of benchmarks/README.md with their commands."""
    section = (FOLDER / "README.md").read_text().partition("\n## Claims\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert rows[0] == ["claim", "what is claimed", "command", "rows and fields"]
    assert all(len(row) == 4 for row in rows)
    found = {row[0]: row[2].strip("`") for row in rows[2:]}
    assert len(found) == len(rows) - 2, "a claim stands there twice"
    return found


def test_every_claim_has_a_row_and_every_row_a_claim() -> None:
    named = {name for _, paragraph in documented() for name in paragraph.claims}
    assert named == set(table())


@pytest.mark.parametrize("claim", table())
def test_its_command_parses(claim: str, capsys: pytest.CaptureFixture[str]) -> None:
    script, *arguments = shlex.split(table()[claim])
    try:
        load(script.removesuffix(".py")).parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def test_no_measured_statement_is_without_a_claim() -> None:
    unmarked = []
    for page, paragraph in documented():
        text = " ".join(paragraph.text.split())
        for sentence in NO_CLAIMS:
            text = text.replace(sentence, "")
        found = Paragraph(text).figures
        if found and not paragraph.claims:
            unmarked.append((page, found, text[:80]))
    assert unmarked == []


@pytest.mark.parametrize("sentence", NO_CLAIMS)
def test_every_exception_is_needed(sentence: str) -> None:
    assert Paragraph(sentence).figures
    assert any(sentence in " ".join(paragraph.text.split()) for _, paragraph in documented())


@pytest.mark.parametrize(
    "text",
    [
        "A step takes 39 ms.",
        "It takes 10 to 20 s, once a machine.",
        "compiled in 2.8 s against 2.5 s",
        "Compilation takes 3 minutes.",
        "1.7 to 1.8 times as long as `torch.export` alone",
        "1.3 times faster",
        "autocast 39 × as long",
        "1.05, autocast 2.7 × |",
        "It needs 228 MB beyond the model.",
        "writes 480 KiB",
        "20 to 50 % slower",
        "It is faster than autocast.",
        "no slower than fp32",
        "takes half as long",
        "many times as long as fp32",
        "O2 runs 32 casts, autocast 156",
        "three times as much memory",
        "<!-- bench: growth -->\n| a |\n| --- |\n\nmade today\n<!-- end bench -->",
    ],
)
def test_measured_statements_are_found(text: str) -> None:
    (paragraph,) = paragraphs(text)
    assert paragraph.figures
    assert paragraph.claims == []


@pytest.mark.parametrize(
    "text",
    [
        "BERT, 4 layers of 128, batch 8 × 64",
        "images of 16 × 3 × 32²",
        "`--input 8x3x224x224:float32`",
        "45 models × 3 levels",
        "positions over 256 in bf16",
        "Python 3.11 and torch 2.13.0",
        "one that fp16 cannot hold (70000, or all of it below 6e-8)",
        "an encoder of 110 million parameters",
        "`1.05 (1.02 to 1.09)` is a ratio",
        "no longer needed",
        "60 random programs",
        "```\ncasts: 11 (408 bytes), 100.0%, 12 ms\n```",
        "",
    ],
)
def test_other_sentences_are_not(text: str) -> None:
    assert [paragraph.figures for paragraph in paragraphs(text) if paragraph.figures] == []


def test_marks_are_read() -> None:
    text = "It takes 3 ms. <!-- claim: speed, size -->\n\nOther.\n\n"
    text += "<!-- bench: a -->\nx\n\ny\n<!-- end bench --> <!-- claim: b -->"
    assert [paragraph.claims for paragraph in paragraphs(text)] == [["speed", "size"], [], ["b"]]


def test_every_script_is_in_the_index() -> None:
    text = (FOLDER / "README.md").read_text()
    scripts = {file.name for file in FOLDER.glob("*.py")}
    named = set(re.findall(r"`(\w+\.py)`", text))
    assert scripts <= named
