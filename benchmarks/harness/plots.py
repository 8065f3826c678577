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
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "amp", "figure.facecolor": "white", "axes.facecolor": "white", "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4",
    "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip


Groups = Mapping[str, Mapping[str, Ratio | float]]


def bars(path: Path, title: str, groups: Groups, label: str, log: bool = False) -> None:
    """Horizontal bars: a group for each subject, in it a bar for each variant; a `Ratio` has its interval drawn.

    Every variant has one colour in all groups. A line marks 1 where bars are ratios.
    """
    panels(path, title, {"": groups}, label, log)


def panels(path: Path, title: str, parts: Mapping[str, Groups], label: str, log: bool = False) -> None:
    """`bars` of several kinds side by side, with the same groups, colours and scale."""
    from matplotlib.ticker import LogLocator

    names = list(dict.fromkeys(group for groups in parts.values() for group in groups))
    variants = list(dict.fromkeys(v for groups in parts.values() for group in groups.values() for v in group))
    rows = {name: max(len(groups.get(name, ())) for groups in parts.values()) for name in names}
    with _style():
        figure = _figure(2.6 + max(6.2, 4.2 * len(parts)), 1.4 + 0.15 * sum(rows.values()) + 0.2 * len(names))
        all_axes = figure.subplots(1, len(parts), sharex=True, sharey=True, squeeze=False)[0]
        named: set[str] = set()
        for axes, (part, groups) in zip(all_axes, parts.items(), strict=True):
            start, ticks, borders = 0.0, [], []
            for name in names:
                _group(axes, start, groups.get(name, {}), variants, named, log)
                ticks.append(start + (rows[name] - 1) / 2)
                borders.append(start + rows[name] + 0.15)
                start += rows[name] + 1.3
            axes.set_yticks(ticks, names)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
            for border in borders[:-1]:
                axes.axhline(border, color="#e4e4e4", linewidth=0.8)
            axes.set_ylim(start - 0.9, -0.9)
            if log:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                _plain_ticks(axes.xaxis)
            if any(isinstance(value, Ratio) for group in groups.values() for value in group.values()):
                axes.axvline(1.0, color="#333333", linewidth=0.9)
            axes.set_xlabel(label)
            axes.set_title(part, fontsize=10, fontweight="normal")
        found = [axes.get_legend_handles_labels() for axes in all_axes]
        handles, labels = ([item for pair in found for item in pair[i]] for i in (0, 1))
        if len(labels) > 1:
            figure.legend(handles, labels, loc="outside right upper")
        _finish(figure, title, path)


def _group(
    axes: Axes, start: float, group: Mapping[str, Ratio | float], variants: Sequence[str], named: set[str], log: bool
) -> None:
    """On a log scale the bar of a ratio starts at 1: to the left is faster, to the right slower."""
    for number, (name, value) in enumerate(group.items()):
        ratio = value if isinstance(value, Ratio) else Ratio(value, value, value)
        error = [[max(0.0, ratio.median - ratio.low)], [max(0.0, ratio.high - ratio.median)]]
        origin = 1.0 if log and isinstance(value, Ratio) else 0.0
        axes.barh(
            start + number, ratio.median - origin, 0.82, left=origin,
            color=COLOURS[variants.index(name) % len(COLOURS)],
            label=None if name in named else name, xerr=error if isinstance(value, Ratio) else None,
            ecolor="#222222", error_kw={"elinewidth": 0.9},
        )  # fmt: skip
        named.add(name)


def lines(
    path: Path,
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    across: str,
    up: str,
    log: bool = True,
) -> None:
    """Lines through points (sizes, values), by name; `log`: both axes."""
    from matplotlib.ticker import LogLocator

    with _style():
        figure = _figure(9, 4.5)
        axes = figure.subplots()
        for number, (name, (sizes, values)) in enumerate(series.items()):
            axes.plot(sizes, values, "o-", markersize=4, color=COLOURS[(number + 1) % len(COLOURS)], label=name)
        if log:
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.set_xticks(sorted({size for sizes, _ in series.values() for size in sizes}))
            _plain_ticks(axes.xaxis)
            _plain_ticks(axes.yaxis)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        figure.legend(loc="outside right upper", fontsize=9)  # outside: inside it would hide lines
        _finish(figure, title, path)


def _style() -> AbstractContextManager[Any]:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _plain_ticks(axis: Any) -> None:
    """1, 10, 0.5 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    figure.savefig(path, metadata={"Date": None})
