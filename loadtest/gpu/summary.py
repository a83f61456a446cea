"""The page that a run leaves behind, from the same results as its JSON file."""

from __future__ import annotations

from collections.abc import Sequence

from lexshard.loadtest.bench.record import Report
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
        "## Measured",
        "",
        "Medians. *device*: the CUDA graph alone; *step*: by the host's clock, with the tokens on "
        "the host. A ratio above 1 says how many times faster the certified head is. Weights and "
        "hidden states are synthetic (`loadtest/gpu/synthetic.py`). *copy*: on the device, read "
        "plus written.",
        "",
        *(["```text", report.table(), "```"] if report.results else ["Not run."]),
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
