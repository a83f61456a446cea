"""The overview: what benchmarks found, each figure with its command, machine and date.

A figure whose run is not at hand is told as missing, with the command that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lexshard.loadtest.report.figures import FIGURES, Figure
from lexshard.loadtest.report.page import document, origin
from lexshard.loadtest.report.plots import NothingMeasuredError

_SAYS = (
    "What lexshard promises is exactness; what it costs is shown here. Every figure says how it "
    "was made. Ratios of two figures hold for one machine, absolute values for the caption's, "
    "at its date: docs/benchmarks.md may have later ones."
)


def write_overview(results: Path, page: Path, figures: Sequence[Figure] = FIGURES) -> list[str]:
    """Writes ``page`` from the files in ``results``; returns the names of figures that are missing.

    Raises ValueError for a file that is no JSON.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    parts, missing = [f"<p>{escape(_SAYS)}</p>", _contents(figures)], []
    for figure in figures:
        report = _read(results / figure.file)
        plots = _plots(figure, report)
        if not plots:
            missing.append(figure.name)
        parts += _section(figure, report, plots)
    page.write_text(document("lexshard, measured", "".join(parts)), encoding="utf-8")
    return missing


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error})") from None


def _plots(figure: Figure, report: Any) -> list[str]:
    if report is None:
        return []
    try:
        return list(figure.draw(report))
    except NothingMeasuredError:
        return []


def _contents(figures: Sequence[Figure]) -> str:
    items = (f'<li><a href="#{each.name}">{escape(each.title)}</a></li>' for each in figures)
    return f"<nav><ul>{''.join(items)}</ul></nav>"


def _section(figure: Figure, report: Any, plots: Sequence[str]) -> Iterator[str]:
    yield f'<h2 id="{figure.name}">{escape(figure.title)}</h2><p>{escape(figure.says)}</p>'
    if plots:
        yield f'<div class="plots">{"".join(plots)}</div>'
        yield origin(report)
        return
    how = f"<code>{escape(figure.command)} --json docs/results/{figure.file}</code> makes it."
    how = how if figure.command else "No command makes it any more: docs/findings.md."
    yield f'<p class="warnings"><b>Missing.</b> {how}</p>'
