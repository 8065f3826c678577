"""A roofline as SVG: the products of a graph by FLOPs per byte, under what a device can compute and move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from ...cost.device import Device
from ...cost.graph import GraphCost

WIDTH, HEIGHT, MARGIN = 720, 440, 60
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def svg(device: Device, graphs: Mapping[str, GraphCost]) -> str:
    """The picture. ``graphs``: what to draw by its name in the legend; a circle's area is a kernel's time."""
    points = {
        name: [(k.flops / k.nbytes, k.flops / k.seconds, k.seconds, k.op) for k in cost.kernels if k.flops and k.nbytes]
        for name, cost in graphs.items()
    }
    every = [p for found in points.values() for p in found]
    top = max(device.peak.values()) * 2
    left = min([0.25, *(p[0] for p in every)])
    right = max([4096.0, *(p[0] for p in every)])
    bottom = min([device.bandwidth * left, *(p[1] for p in every)]) / 2

    def x(intensity: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * math.log(intensity / left) / math.log(right / left)

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * math.log(rate / bottom) / math.log(top / bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(device.title)}: products by FLOPs per byte</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">FLOPs per byte</text>',
        f'<text x="16" y="{HEIGHT / 2}" transform="rotate(-90 16 {HEIGHT / 2})" text-anchor="middle">FLOP/s</text>',
    ]
    for power in range(math.ceil(math.log10(left)), math.floor(math.log10(right)) + 1):
        parts.append(_tick(x(10.0**power), HEIGHT - MARGIN, f"{10.0**power:g}", "middle", 16))
    for power in range(math.ceil(math.log10(bottom)), math.floor(math.log10(top)) + 1):
        parts.append(_tick(MARGIN - 6, y(10.0**power), f"1e{power}", "end", 4))
    for unit, peak in device.peak.items():
        if ":" in unit:
            continue
        knee = peak / device.bandwidth
        start = max(left, bottom / device.bandwidth)
        line = [(start, device.bandwidth * start), (min(max(knee, left), right), peak), (right, peak)]
        places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{places}" fill="none" stroke="#555"/>')
        parts.append(f'<text x="{WIDTH - MARGIN + 4}" y="{y(peak) + 4:.1f}">{escape(unit)}</text>')
    longest = max((p[2] for p in every), default=1.0)
    for colour, (name, found) in zip(_COLOURS * len(points), points.items(), strict=False):
        place = 44 + 16 * list(points).index(name)
        parts.append(f'<text x="{MARGIN + 8}" y="{place}" fill="{colour}">{escape(name)}</text>')
        for intensity, rate, seconds, op in found:
            radius = 2 + 8 * math.sqrt(seconds / longest)
            told = escape(f"{op}: {seconds * 1e6:.3g} µs, {rate / 1e12:.3g} TFLOP/s")
            parts.append(
                f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="{radius:.1f}" fill="{colour}" '
                f'fill-opacity="0.3"><title>{told}</title></circle>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tick(x: float, y: float, text: str, anchor: str, down: float) -> str:
    return f'<text x="{x:.1f}" y="{y + down:.1f}" text-anchor="{anchor}" fill="#555">{text}</text>'
