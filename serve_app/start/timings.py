"""What an engine timed when it started, and so what its choices are based on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

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
    return [
        "milliseconds per step, by rows in the step and threads; more only where clearly faster:",
        _line("rows", counts),
        *(
            _line(rows, (taken.get((rows, threads)) for threads in counts))
            for rows in sorted({rows for rows, _, _ in timings})
        ),
    ]


def head_table(timings: HeadTimings) -> list[str]:
    """What the choice of a screen was based on. A screen that had fallen far behind at fewer rows
    was not timed any more, nor one that was left alone."""
    if not timings:
        return []
    screens = list(dict.fromkeys(screen for _, _, screen, _ in timings))
    kinds = list(dict.fromkeys(kind for kind, _, _, _ in timings))
    taken = {(kind, rows, screen): each for kind, rows, screen, each in timings}
    widths = [max(8, len(screen)) for screen in screens] * len(kinds)
    group = sum(widths) // len(kinds) + 2 * len(screens) - 2
    return [
        "milliseconds per step, by rows in the step and screen:",
        _line("", (KINDS_OF_STEPS[kind] for kind in kinds), repeat(group)),
        _line("rows", screens * len(kinds), widths),
        *(
            _line(
                rows, (taken.get((kind, rows, each)) for kind in kinds for each in screens), widths
            )
            for rows in dict.fromkeys(rows for _, rows, _, _ in timings)
        ),
    ]


def _line(begin: object, cells: Iterable[object], widths: Iterable[int] = repeat(8)) -> str:
    told = (f"{each:.2f}" if isinstance(each, float) else each or "-" for each in cells)
    padded = (f"{each:>{width}}" for each, width in zip(told, widths, strict=False))
    return "  ".join([f"{begin:>4}", *padded])
