"""Plots as SVG texts that stand in a page by themselves."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from lexshard.loadtest.bench.record import format_number, percentile

# Told apart also by those who see few colours (Okabe and Ito), and by their dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and the file is small
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
}
_SIZE = (5.6, 3.4)  # inches
_WIDE_SCALE = 30.0  # from this ratio of p99.9 to median on, a logarithmic axis
NEARLY_ALL = 50.0  # percent


class NothingMeasuredError(LookupError):
    """A plot without a value: what it shows was not measured."""


Samples = Mapping[str, Sequence[float]]  # by endpoint
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
Points = Mapping[str, Sequence[tuple[float, float]]]  # x and y, by name
Lines = Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]  # x and y


def distribution(name: str, samples: Samples) -> str:
    """The share of samples below every value, with medians and p99 in the legend."""
    figure, axes = _figure(name, "ms", "share below")
    largest, middles = [], []
    for index, (who, values) in enumerate(samples.items()):
        if not values:
            continue
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        middle, high = percentile(values, 50), percentile(values, 99)
        label = f"{who}: p50 {format_number(middle)}, p99 {format_number(high)}"
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        axes.step(ordered, shares, where="post", label=label, **_line(index))
        axes.plot([middle, high], [0.5, 0.99], "o", markersize=5, color=_colour(index))
        largest.append(percentile(values, 99.9))
        middles.append(middle)
    if largest and min(middles) > 0 and max(largest) / min(middles) > _WIDE_SCALE:
        axes.set_xscale("log")
        _plain_numbers(axes, "x")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    return _svg(figure, axes, name)


def over_time(name: str, unit: str, lines: Lines, faint: Lines | None = None) -> str:
    """What varies with the seconds of a run; ``faint`` lines belong to those of the same name."""
    figure, axes = _figure(name, "seconds", unit)
    for index, (who, (seconds, values)) in enumerate(lines.items()):
        axes.plot(seconds, values, label=who, **_line(index))
        if faint is not None:
            axes.fill_between(*faint[who], step=None, alpha=0.25, color=_colour(index), linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    return _svg(figure, axes, name)


def curves(name: str, across: str, up: str, lines: Points, *, powers: bool = False) -> str:
    """What depends on something that was chosen: a point for each choice; with ``powers`` both axes
    are logarithmic, and the choices stand below. Shares of nearly all do not begin at 0.

    Raises NothingMeasuredError without points.
    """
    if not any(lines.values()):
        raise NothingMeasuredError(name)
    figure, axes = _figure(name, across, up)
    for index, (who, points) in enumerate(lines.items()):
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker=MARKERS[index % len(MARKERS)], label=who, **_line(index))
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        choices = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(choices, [f"{each:g}" for each in choices])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        _plain_numbers(axes, "y")
    elif min(y for points in lines.values() for _, y in points) < NEARLY_ALL:
        axes.set_ylim(bottom=0)
    return _svg(figure, axes, name)


def bars(name: str, unit: str, found: Sequence[tuple[str, float]]) -> str:
    """One bar for each value, told in numbers, too. Raises NothingMeasuredError without any."""
    if not found:
        raise NothingMeasuredError(name)
    with rc_context(_STYLE):
        figure = Figure(figsize=(_SIZE[0], 0.9 + 0.3 * len(found)), layout="constrained")
        axes = figure.add_subplot()
        values = [value for _, value in found]
        drawn = axes.barh(range(len(found)), values, color=COLOURS[0], height=0.7)
        axes.set_yticks(range(len(found)), [label for label, _ in found])
        axes.bar_label(drawn, [format_number(value) for value in values], padding=3)
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.margins(x=0.15)
        axes.set_xlabel(unit)
        axes.set_title(name)
        axes.grid(visible=False, axis="y")
    return _svg(figure, None, name)


def ratios(name: str, found: Sequence[tuple[str, float]]) -> str:
    """Bars of how many times better ours is; the line at 1 is where both are equal."""
    values = [value for _, value in found]
    with rc_context(_STYLE):
        size = (2 * _SIZE[0], 0.8 + 0.28 * len(found))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        colours = [COLOURS[0] if value >= 1 else COLOURS[1] for value in values]
        # By position, for two cases may read the same.
        bars = axes.barh(range(len(found)), values, color=colours, height=0.7)
        axes.set_yticks(range(len(found)), [label for label, _ in found])
        axes.bar_label(bars, [f"{value:.2f}x" for value in values], padding=3)
        axes.axvline(1.0, color="#444444", linewidth=1)
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.margins(x=0.12)
        axes.set_title(name)
        axes.grid(visible=False, axis="y")
    return _svg(figure, None, name)


def _figure(name: str, across: str, up: str) -> tuple[Figure, Axes]:
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(name)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
    return figure, axes


def _svg(figure: Figure, legend: Axes | None, name: str) -> str:
    """The figure's ``<svg>`` element; ids in it are derived from its name."""
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        if legend is not None and legend.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower left", ncols=1)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def _line(index: int) -> dict[str, Any]:
    return {"color": _colour(index), "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.8}


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _plain_numbers(axes: Axes, which: str) -> None:
    """On a logarithmic axis, 100 and not 10 to the 2."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:g}")
