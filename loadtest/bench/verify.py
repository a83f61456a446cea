"""``lexshard bench verify``: from the logits of target and drafter to the tokens that are emitted.

All contenders start from logits and take turns run by run on the same arrays; a run is 16 sequences
whatever the batch. Beside the speed of a sigmoid stands how far from the target what it emits is.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lexshard.kernels.verify.reference import log_softmax, sigmoid_weights
from lexshard.loadtest.bench.contenders.verify import (
    EXACT,
    OwnVerify,
    VerifyContender,
    sigmoid_name,
    verify_contenders,
)
from lexshard.loadtest.bench.frame import in_turns, run_bench, timed
from lexshard.loadtest.bench.options.verify import LIMITS
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.drafts import VerifyStep, steps_of

COMPARED = 2  # sequences of a case that are also verified by the reference
EVALUATED = 8  # first drafts whose law is computed
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

TIME = Measure("time", "ms", higher_is_better=False)
BYTES = Measure("inputs read", "MB", higher_is_better=False)
MEMORY = Measure("peak memory beyond the inputs", "MB", higher_is_better=False)
STANDING = Measure("drafts standing", "drafts/sequence", higher_is_better=True)
ERROR = Measure("total variation error", "of 1", higher_is_better=False)
EQUAL = Measure("sequences equal to the reference", "%", higher_is_better=True)
NOTES = """\
time: for the whole batch, from logits to tokens; in brackets how many times faster exact is, the
median of the ratios of neighbouring runs. inputs read: each byte once; ours reads a drafter's row
until the outcome is known. peak memory: the most a step takes beyond the inputs. standing: drafts
of a sequence that stand; the others draw with their own random numbers. total variation error: how
far the law of an emitted token is from the target's, by the formula; that of exact is 0."""

Row = npt.NDArray[np.float64]  # [V]


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    threads = arguments.threads
    return run_bench("verify", arguments, measure, checked="sequences", threads=threads)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on every contender; returns how many sequences were not the reference's."""
    sizes = (arguments.vocabulary, arguments.gamma, arguments.batch)
    grid = list(itertools.product(*sizes, arguments.agreement))
    wrong = compared = 0
    for vocabulary, gamma, batch, agreement in tqdm(grid, unit="case", disable=None):
        steps = steps_of(vocabulary, gamma, batch, agreement, arguments.seed)
        contenders = verify_contenders(steps, LIMITS, arguments.threads)
        labels: CaseLabels = {
            "V": vocabulary,
            "gamma": gamma,
            "batch": batch,
            "drafter": agreement,
            "threads": arguments.threads,
        }
        record_once(report, labels, contenders, steps)
        times = in_turns(
            {name: partial(_run_time, each, len(steps)) for name, each in contenders.items()},
            arguments.runs,
            warm_up=0,
        )
        report.add(labels, TIME, times, ours=EXACT)
        errors = {sigmoid_name(each): sigmoid_errors(steps, *each) for each in LIMITS}
        report.add(labels, ERROR, {**errors, "drafter": drafter_distances(steps)})
        found = compare_with_reference(contenders, steps, COMPARED)
        report.add(labels, EQUAL, {"lexshard": [100.0 * (1 - found[0] / found[1])]})
        wrong, compared = wrong + found[0], compared + found[1]
    equal = f"{compared - wrong} of {compared}"
    report.notes += [f"sequences of ours equal to those of the plain reference: {equal}", NOTES]
    return wrong


def _run_time(contender: VerifyContender, steps: int, turn: int) -> float:
    """Milliseconds per step of a run."""
    elapsed, _ = timed(lambda: [contender.decide(number) for number in range(steps)])
    return elapsed / steps


def record_once(
    report: Report,
    labels: CaseLabels,
    contenders: Mapping[str, VerifyContender],
    steps: Sequence[VerifyStep],
) -> None:
    """What one run of each, which is not timed, decides, reads and takes of memory."""
    for name, contender in contenders.items():
        outputs = [
            contender.output(contender.decide(number), step) for number, step in enumerate(steps)
        ]
        report.add(labels, BYTES, {name: [float(np.mean([o.bytes_read for o in outputs])) / 1e6]})
        standing = [float(each) for o in outputs if o.accepted is not None for each in o.accepted]
        if standing:
            report.add(labels, STANDING, {name: [float(np.mean(standing))]})
        peak = peak_memory(lambda each=contender: each.decide(0))  # type: ignore[misc]
        if peak is not None:
            report.add(labels, MEMORY, {name: [peak / 1e6]})


def compare_with_reference(
    contenders: Mapping[str, VerifyContender], steps: Sequence[VerifyStep], count: int
) -> tuple[int, int]:
    """How many of the first ``count`` sequences ours decide otherwise than the plain reference,
    and of how many."""
    wrong = compared = 0
    for contender in contenders.values():
        if not isinstance(contender, OwnVerify):
            continue
        left = count
        for number, step in enumerate(steps):
            part = step.some(0, min(left, step.batch))
            expected = contender.by_reference(part).tokens
            found = contender.decide(number).tokens[: len(expected)]
            same = (found == expected).reshape(part.batch, -1).all(axis=1)
            wrong, compared = wrong + int((~same).sum()), compared + part.batch
            left -= part.batch
            if not left:
                break
    return wrong, compared


def peak_memory(call: Callable[[], object]) -> float | None:
    """Bytes of the process's resident memory at their highest during ``call``, less those before
    it; None where the system does not tell (it takes Linux).

    Freed memory that the C library keeps would hide what is allocated, so it is given back first.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")  # the highest is from now on
        before = _kibibytes("VmRSS")
        call()
        return 1024.0 * max(_kibibytes("VmHWM") - before, 0)
    except (OSError, AttributeError):
        return None


def _kibibytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")


# -- how far from the target what is emitted is ---------------------------------------------------


def emitted_law(weights: Row, drafter: Row, proposed_weights: Row) -> Row:
    """The law of the token that takes a draft's place, where drafts come from ``drafter`` and
    ``weights / proposed_weights`` decides whether they stand."""
    stands = np.minimum(1.0, weights / np.maximum(proposed_weights, np.finfo(np.float64).tiny))
    left = np.maximum(0.0, weights - proposed_weights)
    left = left if left.any() else weights
    return np.asarray(drafter * stands + (drafter * (1 - stands)).sum() * left / left.sum())


def total_variation(one: Row, other: Row) -> float:
    return 0.5 * float(np.abs(one - other).sum())


def sigmoid_errors(steps: Sequence[VerifyStep], alpha: float, beta: float) -> list[float]:
    """Total variation between the target and what is emitted, for the first draft of a sequence."""
    errors = []
    for p, q in first_rows(steps):
        target, drafter = (np.exp(log_softmax(each, 1.0)) for each in (p, q))
        weights, proposed = (sigmoid_weights(each, 1.0, (alpha, beta)) for each in (p, q))
        errors.append(total_variation(emitted_law(weights, drafter, proposed), target))
    return errors


def drafter_distances(steps: Sequence[VerifyStep]) -> list[float]:
    """Total variation between target and drafter: what emitting every draft would be off by."""
    return [
        total_variation(np.exp(log_softmax(p, 1.0)), np.exp(log_softmax(q, 1.0)))
        for p, q in first_rows(steps)
    ]


def first_rows(
    steps: Sequence[VerifyStep],
) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Target's and drafter's logits of the first draft of the first sequences."""
    found = [
        (step.logits[index * (step.gamma + 1)], step.proposed[index * step.gamma])
        for step in steps
        for index in range(step.batch)
    ]
    return found[:EVALUATED]
