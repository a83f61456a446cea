"""The page that a run leaves behind, from the same results as its JSON file."""

from __future__ import annotations

from collections.abc import Sequence

from lexshard.loadtest.bench.record import BenchmarkResult, Report, format_number
from lexshard.loadtest.gpu.checks import TestOutcome


def summary_page(
    report: Report, tests: TestOutcome | None, *, left_out: Sequence[str], wrong: int
) -> str:
    """Markdown: the machine, the tests, the engine, the heads. Nothing stands in it that was not
    run; ``left_out`` is what did not fit the time."""
    machine = report.machine
    lines = [
        "# GPU run",
        "",
        f"`{report.command}` on {machine.get('gpu', 'a machine without a GPU')}, "
        + ", ".join(f"{name} {version}" for name, version in report.versions.items())
        + ".",
        "",
        *_left_out(left_out),
        "## Tests",
        "",
        _tests(tests),
        "",
        f"Tokens of the certified head that the canonical logits do not give: **{wrong}**.",
        "",
        "## Engine",
        "",
        *_engine(report),
        "",
        "## Heads",
        "",
        "Milliseconds (median). *device*: the CUDA graph alone; *step*: by the host's clock, with "
        "the tokens on the host. A ratio above 1 says how many times faster the certified head "
        "is. Weights and hidden states are synthetic (`loadtest/gpu/synthetic.py`).",
        "",
        *_heads(report),
        "",
        "## Memory",
        "",
        *_bandwidths(report),
        "",
    ]
    return "\n".join(lines)


def _tests(tests: TestOutcome | None) -> str:
    if tests is None:
        return "Not run."
    return f"{tests.passed} passed, {tests.failed} failed, {tests.skipped} skipped."


def _left_out(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [
        "**Time ran out. Not run, or not to the end:**",
        "",
        *(f"- {each}" for each in names),
        "",
    ]


def _engine(report: Report) -> list[str]:
    rows = ["| body | sequences | measure | median | runs |", "|---|---|---|---|---|"]
    rows += [
        f"| {result.name} | {result.case['sequences']} | {result.case['measure']} "
        f"| {result.median:.4g} {result.unit} | {len(result.raw)} |"
        for result in report.results
        if "sequences" in result.case
    ]
    return rows if len(rows) > 2 else ["Not run."]


def _heads(report: Report) -> list[str]:
    rows = [
        "| head | tier | rows | wish | rescored | fallbacks | measure | certified | against |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in report.results:
        case = result.case
        if result.name != "certified" or case["measure"] not in ("device", "step"):
            continue
        against = "; ".join(
            f"{each.name} {format_number(each.median)} (**{ratio:.2f}x**)"
            for each, ratio in _rivals(report, result)
        )
        rows.append(
            f"| {case['head']} | {case['tier']} | {case['rows']} | {case['wish']} "
            f"| {_of(report, result, 'rescored')} | {_of(report, result, 'fallbacks')} "
            f"| {case['measure']} | {result.median:.3f} | {against} |"
        )
    return rows if len(rows) > 2 else ["Not run."]


def _rivals(report: Report, ours: BenchmarkResult) -> list[tuple[BenchmarkResult, float]]:
    ratios = {each.against: each.ratio for each in report.ratios if each.case == ours.case}
    return [
        (each, ratios[each.name])
        for each in report.results
        if each.case == ours.case and each.name in ratios
    ]


def _of(report: Report, like: BenchmarkResult, measure: str) -> str:
    """The mean of another measure of the same case."""
    case = {**like.case, "measure": measure}
    for each in report.results:
        if each.case == case and each.name == like.name:
            return format_number(sum(each.raw) / len(each.raw))
    return ""


def _bandwidths(report: Report) -> list[str]:
    copies = [each for each in report.results if each.name == "copy"]
    if not copies:
        return ["Not run."]
    copy = copies[0].median
    lines = [
        f"A copy within the device moves {copy:,.0f} GB/s, read plus written.",
        "",
    ]
    lines += ["| head | tier | rows | screen GB/s | share of a copy |", "|---|---|---|---|---|"]
    for each in report.results:
        if each.name == "screen" and each.case["measure"] == "bandwidth":
            case = each.case
            lines.append(
                f"| {case['head']} | {case['tier']} | {case['rows']} | {each.median:,.0f} "
                f"| {each.median / copy:.0%} |"
            )
    return lines
