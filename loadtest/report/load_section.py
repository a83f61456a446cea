"""The part of a page that shows a load: endpoints side by side at each rate, and over the rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lexshard.loadtest.bench.load.figures import milliseconds
from lexshard.loadtest.bench.load.timeline import LoadRun, over_time
from lexshard.loadtest.bench.record import format_number
from lexshard.loadtest.report.plots import Lines, distribution
from lexshard.loadtest.report.plots import over_time as plot_over_time

_INTERVALS = 60
_LATENCIES = (
    "TTFT median",
    "TTFT p99",
    "TPOT median",
    "TPOT p99",
    "ITL median",
    "ITL p99",
    "E2E median",
    "E2E p99",
)
_COUNTS = (
    "answered",
    "errors",
    "requests/s",
    "output tokens/s",
    "goodput",
    "good share",
    "most in flight",
    "client late p99",
    "client loop delay p99",
)
_EXPLANATION = (
    "Latencies in milliseconds, from the sending of a request, of answered requests alone. ITL: "
    "between neighbouring pieces of text. TPOT: (E2E - TTFT) / (tokens - 1). Goodput: requests per "
    "second that meet every objective. Client late: by how much requests were sent after their "
    "moment; client loop delay: by how much its clock ticked late."
)

TableWriter = Callable[[Sequence[str], Sequence[Sequence[str]], int], str]


def load_section(report: Mapping[str, Any], table: TableWriter) -> Iterator[str]:
    """Pieces of HTML for a report of ``lexshard bench serve``."""
    runs = [LoadRun.from_json(each) for each in report["load"]]
    rates = list(dict.fromkeys(run.rate for run in runs))
    endpoints = list(dict.fromkeys(run.endpoint for run in runs))
    medians = {
        (each["case"]["rate"], each["name"], each["case"]["measure"]): each["median"]
        for each in report["results"]
    }
    settings = {
        key: value
        for key, value in report["results"][0]["case"].items()
        if key not in ("rate", "measure", "requests")
    }
    yield f"<p>{escape(', '.join(f'{key} {value}' for key, value in settings.items()))}</p>"
    for measures in (_COUNTS, _LATENCIES):
        known = [each for each in measures if any(each == measure for *_, measure in medians)]
        rows = []
        for place in [(rate, who) for rate in rates for who in endpoints]:
            values = [medians.get((*place, measure)) for measure in known]
            rows.append([str(place[0]), place[1], *map(_number, values)])
        yield table(["rate", "of", *known], rows, 2)
    yield f'<p class="small">{escape(_EXPLANATION)}</p>'
    for rate in rates:
        here = [run for run in runs if run.rate == rate]
        name = "Times of the trace" if rate == "trace" else f"{rate:g} requests/s"
        yield f"<h3>{name}</h3>"
        yield _plots(_distributions(name, here))
        yield (
            '<p class="small">Over time: the first run of each. Shaded: in flight without a token '
            "yet, which is the queue as a client sees it, and prefill.</p>"
        )
        yield _plots(_times(name, here))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == round(value) else format_number(value)


def _plots(plots: Iterator[str]) -> str:
    return f'<div class="plots">{"".join(plots)}</div>'


def _distributions(name: str, runs: Sequence[LoadRun]) -> Iterator[str]:
    pooled: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for measure, values in milliseconds(run).items():
            pooled.setdefault(measure, {}).setdefault(run.endpoint, []).extend(values)
    for measure in ("TTFT", "ITL", "TPOT", "E2E"):
        if any(pooled[measure].values()):
            yield distribution(f"{measure}, {name}", pooled[measure])


def _times(name: str, runs: Sequence[LoadRun]) -> Iterator[str]:
    first = {run.endpoint: over_time(run, _INTERVALS) for run in reversed(runs) if run.run == 0}
    first = {run.endpoint: first[run.endpoint] for run in runs}
    tokens: Lines = {who: (each.seconds, each.tokens_per_second) for who, each in first.items()}
    flight: Lines = {who: (each.seconds, each.in_flight) for who, each in first.items()}
    waiting: Lines = {who: (each.seconds, each.waiting) for who, each in first.items()}
    yield plot_over_time(f"Output tokens/s, {name}", "tokens/s", tokens)
    yield plot_over_time(f"Requests in flight, {name}", "requests", flight, waiting)
