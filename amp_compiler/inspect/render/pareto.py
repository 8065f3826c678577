"""The trials of a search as SVG: the share of low work against the metric, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN = 640, 400, 60
_HOLDS, _FAILS, _GRAY = "#2ca02c", "#d62728", "#555"


@dataclass(frozen=True, slots=True)
class Point:
    """One trial: ``x`` is the share of low work, ``y`` the metric. A metric that is not finite is drawn at the edge."""

    x: float
    y: float
    holds: bool
    title: str


def svg(
    points: Sequence[Point], front: Sequence[tuple[float, float]], baseline: float, bound: float, objective: str
) -> str:
    """Return the picture. ``bound``: the worst metric that is within the tolerance."""
    near = 12 * abs(baseline - bound)  # trials that are far off would hide the ones that matter
    known = [p.y for p in points if math.isfinite(p.y) and (not near or abs(p.y - baseline) <= near)]
    bottom, top = min([baseline, bound, *known]), max([baseline, bound, *known])
    room = (top - bottom) / 20 or abs(top) / 20 or 1.0
    bottom, top = bottom - room, top + room
    lost = bottom if bound <= baseline else top

    def x(share: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * share

    def y(value: float) -> float:
        shown = min(max(value if math.isfinite(value) else lost, bottom), top)
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (shown - bottom) / (top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">Trials: share of {escape(objective)} in low precision</text>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH - 2 * MARGIN}" height="{HEIGHT - 2 * MARGIN}" fill="none" '
        f'stroke="{_GRAY}"/>',
        f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})" text-anchor="middle">metric</text>',
    ]
    parts += [_text(x(share), HEIGHT - MARGIN + 16, f"{share:.0%}", "middle") for share in (0, 0.25, 0.5, 0.75, 1)]
    for value, name in ((baseline, "fp32"), (bound, "tolerance")):
        parts.append(f'<line x1="{x(0)}" x2="{x(1)}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{_GRAY}" '
                     'stroke-dasharray="4 3"/>')  # fmt: skip
        parts.append(_text(x(1) + 4, y(value) + 4, name, "start"))
        parts.append(_text(x(0) - 4, y(value) + 4, f"{value:.4g}", "end"))
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_HOLDS}"/>')
    for point in points:
        told = escape(f"{point.title}, {point.x:.1%} low, metric {point.y:.6g}")
        parts.append(f'<circle cx="{x(point.x):.1f}" cy="{y(point.y):.1f}" r="4" fill-opacity="0.6" '
                     f'fill="{_HOLDS if point.holds else _FAILS}"><title>{told}</title></circle>')  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_GRAY}">{escape(text)}</text>'
