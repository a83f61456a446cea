"""What benchmark commands have in common: options, a report, pinned cores, an exit status."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from lexshard.loadtest.bench.machine import describe_machine, installed_versions, pinned_to_cores
from lexshard.loadtest.bench.record import Report


def add_common_arguments(
    parser: argparse.ArgumentParser, *, runs: int, quick_runs: int, seed: int
) -> None:
    """How often, how quick, with which seed, and where to write it."""
    parser.add_argument("--runs", type=int, metavar="N", help=f"default {runs}, quick {quick_runs}")
    parser.add_argument("--quick", action="store_true", help="the same cases, fewer runs: a minute")
    parser.add_argument("--seed", type=int, default=seed, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them, as a type of argument."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give positive numbers, for example 1,8,32")
    return found


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an argument that is some of the ``known`` names with commas between them."""
    choices = tuple(known)

    def names(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        for name in found:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return found

    return names


@contextmanager
def on_pinned_cores(report: Report, threads: int) -> Iterator[Sequence[int]]:
    """As many cores as ``threads``, which the report names; torch and our kernels use them."""
    import torch  # seconds, which options and their help do without

    from lexshard.kernels import pool

    with pinned_to_cores(threads) as cores:
        torch.set_num_threads(threads)
        pool.set_threads(threads)
        report.machine["pinned_to_cores"] = list(cores)
        yield cores


def run_measurement(
    name: str,
    arguments: argparse.Namespace,
    measure: Callable[[Report, argparse.Namespace], int],
    checked: str,
    threads: int | None = None,
) -> int:
    """``lexshard bench NAME``: the exit status, after what was measured has been written.

    ``measure`` fills the report and returns how many of what is ``checked`` came out wrong. It runs
    on as many cores as ``threads``, if that is given.
    """
    report = Report(
        machine=describe_machine(),
        versions=installed_versions(),
        command=shlex.join(["lexshard", *sys.argv[1:]]),
        seed=arguments.seed,
    )
    try:
        with nullcontext() if threads is None else on_pinned_cores(report, threads):
            wrong = measure(report, arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"lexshard bench {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lexshard bench {name}: interrupted", file=sys.stderr)
        return 1
    if arguments.json is not None:
        report.write(arguments.json)
        print(f"written: {arguments.json}")
    if wrong:
        print(f"lexshard bench {name}: {wrong} {checked} are wrong", file=sys.stderr)
    return 1 if wrong else 0
