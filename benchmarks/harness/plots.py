"""Drawings of results, as SVG: light background, text as outlines, the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .timing import Ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers (Okabe and Ito), grey first for what others are divided by.
COLOURS = ("#7f7f7f", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#000000", "#8c564b")
STYLE = {
    "svg.hashsalt": "amp", "figure.facecolor": "white", "axes.facecolor": "white", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
    "axes.axisbelow": True, "legend.frameon": False, "axes.titleweight": "bold", "axes.titlelocation": "left",
}  # fmt: skip


def bars(
    path: Path, title: str, groups: Mapping[str, Mapping[str, Ratio | float]], label: str, log: bool = False
) -> None:
    """Horizontal bars: a group for each subject, in it a bar for each variant; a `Ratio` has its interval drawn.

    Every variant has one colour in all groups. A line marks 1 where bars are ratios.
    """
    variants = list(dict.fromkeys(name for group in groups.values() for name in group))
    height = 0.19 * sum(len(group) for group in groups.values()) + 0.25 * len(groups) + 1.6
    with _style():
        figure, axes = _figure(9, height)
        position, ticks = 0.0, []
        named: set[str] = set()
        for group in groups.values():
            start = position
            for name, value in group.items():
                ratio = value if isinstance(value, Ratio) else Ratio(value, value, value)
                error = [[max(0.0, ratio.median - ratio.low)], [max(0.0, ratio.high - ratio.median)]]
                axes.barh(
                    position, ratio.median, 0.85, color=COLOURS[variants.index(name) % len(COLOURS)],
                    label=None if name in named else name,
                    xerr=error if isinstance(value, Ratio) else None, ecolor="#333333", error_kw={"elinewidth": 0.9},
                )  # fmt: skip
                named.add(name)
                position += 1
            ticks.append((start + position - 1) / 2)
            position += 1.2
        axes.set_yticks(ticks, list(groups))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        if log:
            axes.set_xscale("log")
            _plain_ticks(axes.xaxis)
        if any(isinstance(value, Ratio) for group in groups.values() for value in group.values()):
            axes.axvline(1.0, color="#333333", linewidth=0.9)
        axes.set_xlabel(label)
        _finish(figure, axes, title, path)


def lines(
    path: Path,
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    across: str,
    up: str,
    log: bool = True,
) -> None:
    """Lines through points (sizes, values), by name; `log`: both axes."""
    with _style():
        figure, axes = _figure(7.5, 4.5)
        for number, (name, (sizes, values)) in enumerate(series.items()):
            axes.plot(sizes, values, "o-", markersize=4, color=COLOURS[(number + 1) % len(COLOURS)], label=name)
        if log:
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(sorted({size for sizes, _ in series.values() for size in sizes}))
            _plain_ticks(axes.xaxis)
            _plain_ticks(axes.yaxis)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        _finish(figure, axes, title, path)


def _style() -> AbstractContextManager[Any]:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.add_subplot()


def _plain_ticks(axis: Any) -> None:
    """1, 10, 0.5 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, axes: Axes, title: str, path: Path) -> None:
    axes.set_title(title)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        figure.legend(loc="outside right upper")
    figure.savefig(path, metadata={"Date": None})
