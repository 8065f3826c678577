"""Measured figures in prose: which paragraphs of a page state one, and which claims they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER = r"(?<![\w.])\d[\d,.]*"
#: what a measured figure of speed, memory or compile time looks like
FIGURES = re.compile(
    "|".join(
        [
            rf"{_NUMBER}\s?(?:ns|µs|ms|s|seconds?|minutes?|hours?)\b",
            rf"{_NUMBER}\s?(?:B|KB|MB|GB|KiB|MiB|GiB|bytes)\b",
            rf"{_NUMBER}\s?%",
            rf"{_NUMBER}\s?×(?!\s?[\d(])",  # 39 × as a factor; 8 × 64 is a shape
            rf"{_NUMBER}\s?(?:times|x)\b(?!\s?\d)",
            rf"{_NUMBER}\s(?:casts|ops)\b",
            r"\btimes as (?:long|fast|slow|much|many|large)\b",
            r"\bas (?:long|fast|slow) as\b",
            r"\b(?:faster|slower|longer|twice|half) (?:than|as)\b",
            r"\b(?:faster|slower)\b",
            r"\bno (?:slower|faster)\b",
        ]
    )
)
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"<!-- bench: .*?<!-- end bench -->", re.DOTALL)
_MARK = re.compile(r"<!-- claim: (?P<names>[^>]+?) -->")


@dataclass(frozen=True)
class Paragraph:
    """Text between empty lines; a block that publish.py writes is one, with what stands behind it."""

    text: str

    @property
    def claims(self) -> list[str]:
        return [name.strip() for mark in _MARK.finditer(self.text) for name in mark["names"].split(",")]

    @property
    def figures(self) -> list[str]:
        """What looks measured in it; a table that publish.py writes always is."""
        made = ["a table of publish.py"] if _BLOCK.search(self.text) else []
        prose = re.sub(r"`[^`]*`", "``", _MARK.sub("", _BLOCK.sub("", self.text)))
        return made + [found[0] for found in FIGURES.finditer(prose)]


def paragraphs(text: str) -> Iterator[Paragraph]:
    """The paragraphs outside of code; a Markdown table is one."""
    text = _BLOCK.sub(lambda block: re.sub(r"\n\s*\n", "\n", block[0]), _FENCE.sub("", text))
    return (Paragraph(part.strip()) for part in re.split(r"\n\s*\n", text) if part.strip())
