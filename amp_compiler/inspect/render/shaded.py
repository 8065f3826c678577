"""One HTML page of rows that are coloured by how well their numbers fit a dtype, with histograms on a click."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Protocol

import torch

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
summary, .head { display: grid; grid-template-columns: 3fr repeat(var(--columns), 1fr); gap: .5em; padding: .2em .5em }
summary { cursor: pointer }
.head { font-weight: bold }
summary span:not(:first-child) { text-align: right }
.overflows { background: #f9c9c4 } .vanishes { background: #fde9b8 } .fits { background: #e4f2e4 }
svg { margin: .5em 1em } text { font-size: 10px } small { color: #555; margin-left: 1em }
"""


class Values(Protocol):
    """What is known of the values of a tensor: pairs of an exponent and how many magnitudes have it."""

    @property
    def exponents(self) -> tuple[tuple[int, int], ...]: ...


def shaded_page(title: str, parts: Mapping[str, tuple[Sequence[str], Sequence[str]]], lines: Sequence[str] = ()) -> str:
    """Return the page. ``parts``: by heading ("" for none), the names of the columns and the rows that ``cells`` made.
    ``lines``: of text, above the parts."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for heading, (names, rows) in parts.items():
        head = "".join(f"<span>{escape(name)}</span>" for name in names)
        body += [f"<h2>{escape(heading)}</h2>"] * bool(heading)
        body += [f'<section style="--columns: {len(names) - 1}"><div class="head">{head}</div>', *rows, "</section>"]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body data-ready=yes>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def cells(
    kind: str, name: str, figures: Sequence[str], *, shades: Mapping[int, float] | None = None, detail: str = "",
    ranges: Mapping[str, Values] | None = None, dtype: torch.dtype = torch.float16,
) -> str:  # fmt: skip
    """Return a row: ``overflows`` is red, ``vanishes`` yellow and ``fits`` green. ``shades``: how dark a figure's cell
    is, from 0 to 1, by its place. ``detail`` and the histograms of ``ranges`` are shown on a click."""
    shown = []
    for place, figure in enumerate(figures):
        dark = (shades or {}).get(place)
        style = "" if dark is None else f' style="background: rgba(60, 90, 200, {dark * 0.6:.2f})"'
        shown.append(f"<span{style}>{escape(figure)}</span>")
    charts = "".join(histogram(label, values, dtype) for label, values in (ranges or {}).items())
    return (
        f'<details><summary class="{kind}"><span>{escape(name)}</span>{"".join(shown)}</summary>'
        f"<small>{escape(detail)}</small><br>{charts}</details>"
    )


def histogram(name: str, values: Values, dtype: torch.dtype) -> str:
    """Return the exponents as bars; those that the dtype does not hold in full are red."""
    if not values.exponents:
        return ""
    first, last = values.exponents[0][0], values.exponents[-1][0]
    most = max(count for _, count in values.exponents)
    limits = torch.finfo(dtype)
    bars = []
    for exponent, count in values.exponents:
        height = max(round(60 * count / most), 1)
        colour = "#4a7" if limits.smallest_normal <= 2.0**exponent <= limits.max else "#d43"
        bars.append(
            f'<rect x="{(exponent - first) * 8}" y="{60 - height}" width="7" height="{height}" fill="{colour}">'
            f"<title>2^{exponent}: {count:,}</title></rect>"
        )
    width = max((last - first + 1) * 8, 140)
    return (
        f'<svg width="{width}" height="76" role="img" aria-label="exponents of the {name}">{"".join(bars)}'
        f'<text x="0" y="74">{name}: 2^{first} to 2^{last}</text></svg>'
    )
