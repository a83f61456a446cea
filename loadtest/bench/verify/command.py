"""``lexshard bench verify``: from the logits of target and drafter to the tokens that are emitted.

Exact and sigmoid verification (`kernels.verify`), every draft of a batch in one call, beside
``_speculative_sampling`` of transformers, which takes one sequence and is called once for each,
beside the same algorithm in plain torch for a whole batch, and beside the floor: the time to read
all inputs once. All start from logits, take turns run by run on the same arrays, and a run is 16
sequences with other logits each, whatever the batch. Beside the speed of a sigmoid stands how far
from the target what it emits is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from tqdm import tqdm

from lexshard.loadtest.bench.measurement import run_measurement
from lexshard.loadtest.bench.record import Report, paired_ratio
from lexshard.loadtest.bench.verify.case import VerifyCase, table
from lexshard.loadtest.bench.verify.contenders import (
    EXACT,
    SIGMOID,
    TRANSFORMERS,
    OwnContender,
    cpu_contenders,
)
from lexshard.loadtest.bench.verify.options import QUICK_RUNS, RUNS
from lexshard.loadtest.bench.verify.workload import steps_of

COMPARED = 2  # sequences of a case that are also verified by the reference


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_measurement("verify", arguments, measure, "sequences", arguments.threads)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on every contender; returns how many sequences were not the reference's."""
    contenders = cpu_contenders(arguments.limits, arguments.threads)
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    grid = list(
        itertools.product(
            arguments.vocabulary, arguments.gamma, arguments.batch, arguments.agreement
        )
    )
    cases = []
    for vocabulary, gamma, batch, agreement in tqdm(grid, unit="case", disable=None):
        case = VerifyCase(
            steps_of(vocabulary, gamma, batch, agreement, arguments.seed),
            labels={
                "V": vocabulary,
                "gamma": gamma,
                "batch": batch,
                "drafter": agreement,
                "threads": arguments.threads,
            },
        )
        case.take_turns(contenders, runs)
        case.compare_with_reference(contenders, COMPARED)
        case.measure_errors(arguments.limits)
        case.record(report)
        case.steps = ()  # its logits
        cases.append(case)
    print(f"\n{table(cases)}\n")
    print_summary(cases, arguments.limits)
    return sum(case.compared - case.equal for case in cases)


def print_summary(cases: Sequence[VerifyCase], limits: Sequence[tuple[float, float]]) -> None:
    """What the figures mean, and the two ratios of each case that count."""
    equal, compared = sum(c.equal for c in cases), sum(c.compared for c in cases)
    print(f"sequences of ours equal to those of the plain reference: {equal} of {compared}")
    for case in cases:
        times = case.milliseconds
        against = _ratio(times[EXACT], times[TRANSFORMERS])
        words = f"{against:.1f}x transformers" + (", looped" if case.labels["batch"] != 1 else "")
        words += f"; {case.times_of_reading(EXACT):.2f}x the time to read the inputs once"
        sigmoids = [OwnContender(SIGMOID, each).name for each in limits]
        ratios = [_ratio(times[name], times[EXACT]) for name in sigmoids]
        words += f"; sigmoids are {min(ratios):.1f}x to {max(ratios):.1f}x as fast"
        place = ", ".join(f"{key} {case.labels[key]}" for key in ("V", "gamma", "batch", "drafter"))
        distance = sum(case.distances) / len(case.distances)
        print(f"{place} (TV {distance:.2f}): exact is {words}")
    print(NOTES)


NOTES = """\
ms/step: median over runs, for the whole batch, from logits to tokens. of reading: time over that of
reading all inputs once, exact is: how many times faster than this line exact is; both are medians
of the ratios of neighbouring runs. MB read: of the inputs, each byte once; ours stops reading where
the outcome is known. peak MB: the most memory a step takes beyond the inputs. standing: drafts of a
sequence that stand; the others draw with their own random numbers, and the token after them. TV
error: how far the law of an emitted token is from the target's, computed from the formula; that of
exact is 0."""


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return paired_ratio(ours, theirs, higher_is_better=False)
