"""What an engine timed when it started, and so what its choices are based on."""

from __future__ import annotations

from collections.abc import Sequence

KINDS_OF_STEPS = {"one": "without top-k", "several": "with top-k"}

# Kind of step, rows in it, screen, milliseconds; and rows, threads, milliseconds.
HeadTimings = Sequence[tuple[str, int, str, float]]
ThreadTimings = Sequence[tuple[int, int, float]]


def told_screens(timings: HeadTimings) -> str:
    """What each screen takes for the smallest step, the fastest first."""
    least = min(rows for _, rows, _, _ in timings)
    taken = sorted(
        (each, screen) for kind, rows, screen, each in timings if (kind, rows) == ("one", least)
    )
    (first, name), *others = taken
    told = [
        f"{name} {first:.2f} ms per token",
        *(f"{screen} {each:.2f}" for each, screen in others),
    ]
    return ", ".join(told)


def told_threads(choices: Sequence[tuple[int, int]]) -> str:
    """``choices`` are from how many rows in a step on it has how many threads."""
    (_, first), *others = choices
    told = [f"{first} thread{'s' if first > 1 else ''}"]
    told.extend(f"{threads} from {rows} rows on" for rows, threads in others)
    return ", ".join(told)


def thread_table(timings: ThreadTimings) -> list[str]:
    """What the choice of the number of threads was based on; nothing where it was given."""
    if not timings:
        return []
    counts = sorted({threads for _, threads, _ in timings})
    taken = {(rows, threads): each for rows, threads, each in timings}
    table = [
        "milliseconds per step, by rows in the step and threads; more only where clearly faster:",
        "  ".join([f"{'rows':>4}", *(f"{threads:>8}" for threads in counts)]),
    ]
    for rows in sorted({rows for rows, _, _ in timings}):
        cells = (f"{_milliseconds(taken.get((rows, threads))):>8}" for threads in counts)
        table.append("  ".join([f"{rows:>4}", *cells]))
    return table


def head_table(timings: HeadTimings) -> list[str]:
    """What the choice of a screen was based on. A screen that had fallen far behind at fewer rows
    was not timed any more, nor one that was left alone."""
    if not timings:
        return []
    screens = list(dict.fromkeys(screen for _, _, screen, _ in timings))
    kinds = list(dict.fromkeys(kind for kind, _, _, _ in timings))
    taken = {(kind, rows, screen): each for kind, rows, screen, each in timings}
    widths = [max(len(screen), 8) for screen in screens]
    group = sum(widths) + 2 * (len(widths) - 1)
    header = [f"{screen:>{width}}" for screen, width in zip(screens, widths, strict=True)]
    table = [
        "milliseconds per step, by rows in the step and screen:",
        "  ".join([f"{'':>4}", *(f"{KINDS_OF_STEPS[kind]:>{group}}" for kind in kinds)]),
        "  ".join([f"{'rows':>4}", *header * len(kinds)]),
    ]
    for rows in dict.fromkeys(rows for _, rows, _, _ in timings):
        cells = (
            f"{_milliseconds(taken.get((kind, rows, screen))):>{width}}"
            for kind in kinds
            for screen, width in zip(screens, widths, strict=True)
        )
        table.append("  ".join([f"{rows:>4}", *cells]))
    return table


def _milliseconds(taken: float | None) -> str:
    return "-" if taken is None else f"{taken:.2f}"
