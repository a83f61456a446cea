"""A page of reports: one HTML file, plots inline, nothing from elsewhere, no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lexshard.loadtest.bench.record import format_number
from lexshard.loadtest.report.load_section import load_section
from lexshard.loadtest.report.plots import ratios

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e5e5e5;
         white-space: nowrap; }
th { color: #555; font-weight: 600; white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
code { background: #f4f4f4; padding: .1rem .3rem; overflow-wrap: anywhere; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots svg { max-width: 100%; height: auto; }
.warnings { border-left: 4px solid #D55E00; background: #fdf3ec; padding: .6rem 1rem; }
nav ul { columns: 3 14rem; padding-left: 1.2rem; }
.small { color: #666; font-size: .88rem; }
"""


def write_page(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """``reports`` are what ``--json`` writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(reports), encoding="utf-8")


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """The page's HTML."""
    sections = (part for report in reports for part in _section(report))
    return document("lexshard report", "".join(sections))


def document(title: str, content: str) -> str:
    """A whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_CSS}</style></head><body><h1>{escape(title)}</h1>{content}</body></html>\n"
    )


def origin(report: Mapping[str, Any]) -> str:
    """How, where and when a report was made."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    told = (
        f"{machine.get('processor', '')}, {machine.get('cores', '?')} cores, "
        f"{machine.get('system', '')}. {versions}. Seed {report.get('seed', '?')}. "
        f"{report.get('date', 'Its date was not written down')}."
    )
    return f'<p class="small"><code>{escape(report["command"])}</code><br>{escape(told)}</p>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Text in the first columns, numbers in all others."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=text' if index < text_columns else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(headers, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _section(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(' '.join(report['command'].split()[:3]))}</h2>"
    yield origin(report)
    if warnings := report.get("warnings"):
        items = "".join(f"<li>{escape(each)}</li>" for each in warnings)
        yield f'<div class="warnings"><b>To be known first</b><ul>{items}</ul></div>'
    if "load" in report:
        yield from load_section(report, table)
    elif found := report["ratios"]:
        settled = _settled([each["case"] for each in found])
        bars = [(_place(each["case"], settled, each["against"]), each["ratio"]) for each in found]
        yield f"<p>{escape(_place(settled, {}))}</p>"
        yield f'<div class="plots">{ratios("How many times better ours is", bars)}</div>'
    yield "<h3>All figures</h3>"
    yield _results(report)


def _results(report: Mapping[str, Any]) -> str:
    found = [each for each in report["results"] if "median" in each]
    settled = _settled([each["case"] for each in found])
    rows = [
        [
            _place(each["case"], settled),
            each["name"],
            *(format_number(each[key]) for key in ("median", "p10", "p90")),
            each["unit"],
            str(each["runs"]),
        ]
        for each in found
    ]
    return table(["case", "of", "median", "p10", "p90", "unit", "runs"], rows, text_columns=2)


def _settled(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is the same in all of several cases."""
    first = cases[0] if len(cases) > 1 else {}
    return {
        key: value for key, value in first.items() if all(case.get(key) == value for case in cases)
    }


def _place(case: Mapping[str, Any], settled: Mapping[str, Any], against: str = "") -> str:
    """A case in words, without what is settled; its measure first."""
    told = {key: value for key, value in case.items() if key not in settled}
    measure = told.pop("measure", None)
    place = [*([str(measure)] if measure else []), *(f"{key} {told[key]}" for key in told)]
    return ", ".join(place) + (f" (against {against})" if against else "")
