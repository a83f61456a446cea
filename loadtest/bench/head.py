"""``lexshard bench head``: from hidden states to tokens, the certified head beside dense ones.

All contenders take turns step by step on the same hidden states, which are others in every step.
Afterwards the tokens of the certified head are compared with those of all canonical logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.states.need import Need
from lexshard.loadtest.bench.contenders.head import (
    OURS,
    HeadContender,
    HeadOutput,
    HeadStep,
    head_contenders,
)
from lexshard.loadtest.bench.frame import in_turns, run_bench, timed
from lexshard.loadtest.bench.machine import read_bandwidth
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.head_workload import (
    SAMPLING_METHODS,
    HeadWorkload,
    draw_from_all,
    needs,
    synthetic_workload,
)

WARM_UP = 2
QUICK_COMPARED = 1  # steps whose tokens --quick compares with canonical logits of all rows

TIME = Measure("time", "ms", higher_is_better=False)
BYTES = Measure("bytes read", "MB", higher_is_better=False)
RESCORED = Measure("rescored rows", "rows/token", higher_is_better=False)
TIGHTNESS = Measure("tightness", "of 1", higher_is_better=True)
CERTIFIED = Measure("certified", "%", higher_is_better=True)
FALLBACK = Measure("fallback", "%", higher_is_better=False)
EQUAL = Measure("tokens equal to canonical dense", "%", higher_is_better=True)
NOTES = """\
In brackets: how many times faster the certified head is, the median of the ratios of neighbouring
steps. certified and own dense: screen, rescoring and draw, the same tokens. The others draw with
torch: argmax, softmax / exponential noise, or top-k first; other tokens."""


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    checked, threads = "certified tokens", arguments.threads
    return run_bench("head", arguments, measure, checked=checked, threads=threads)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every batch size and need, contenders side by side; returns how many tokens were wrong."""
    bandwidth = read_bandwidth(arguments.threads)
    report.machine["read_bytes_per_second"] = bandwidth
    print(f"{arguments.threads} thread(s) read {bandwidth / 1e9:.1f} GB/s of the host's memory")
    workload = synthetic_workload(
        arguments.vocabulary, arguments.columns, getattr(torch, arguments.dtype), arguments.seed
    )
    contenders = head_contenders(workload, arguments.tier, max(arguments.batch))
    compared = wrong = 0
    for batch, name in product(arguments.batch, arguments.need):
        method = SAMPLING_METHODS[name]
        steps = [step_of(workload, method, batch, n) for n in range(WARM_UP + arguments.runs)]
        found = in_turns(
            {name: partial(_answer, each, steps) for name, each in contenders.items()},
            arguments.runs,
            warm_up=WARM_UP,
        )
        size, columns = workload.weight.shape
        labels: CaseLabels = {
            "V": size,
            "d": columns,
            "dtype": str(workload.weight.dtype).removeprefix("torch."),
            "threads": arguments.threads,
            "tier": arguments.tier,
            "batch": batch,
            "need": name,
        }
        times = {name: [ms for ms, _ in of] for name, of in found.items()}
        read = {name: [each.bytes_read / 1e6 for _, each in of] for name, of in found.items()}
        report.add(labels, TIME, times, ours=OURS)
        report.add(labels, BYTES, read, ours=OURS)
        outputs = [each for _, each in found[OURS]]
        record_certificates(report, labels, outputs)
        looked_at = outputs[: QUICK_COMPARED if arguments.quick else None]
        equal = sum(
            int(np.count_nonzero(canonical_tokens(workload, step) == each.tokens))
            for step, each in zip(steps[WARM_UP:], looked_at, strict=False)
        )
        report.add(labels, EQUAL, {OURS: [100.0 * equal / (batch * len(looked_at))]})
        compared, wrong = compared + batch * len(looked_at), wrong + batch * len(looked_at) - equal
    told = f"certified tokens equal to those of all canonical logits: {compared - wrong}"
    report.notes += [f"{told} of {compared}", NOTES]
    return wrong


def step_of(workload: HeadWorkload, method: Need, batch: int, number: int) -> HeadStep:
    return HeadStep(workload.states(number, batch), method, needs(method, batch, number))


def _answer(
    contender: HeadContender, steps: Sequence[HeadStep], turn: int
) -> tuple[float, HeadOutput]:
    step = steps[turn + WARM_UP]
    return timed(lambda: contender.answer(step))


def canonical_tokens(workload: HeadWorkload, step: HeadStep) -> npt.NDArray[np.int64]:
    """The tokens [B] that the canonical logits of every row give."""
    return draw_from_all(workload.logits(step.hidden), step.needs)


def record_certificates(report: Report, labels: CaseLabels, outputs: Sequence[HeadOutput]) -> None:
    """What was rescored, and how often that was certified."""
    found = [each for output in outputs for each in output.certificates]
    certified = sum(each.guarantee in ("deterministic", "probabilistic") for each in found)
    fallbacks = sum(each.fallback for each in found)
    report.add(labels, RESCORED, {OURS: [float(each.rescored_rows) for each in found]})
    report.add(labels, TIGHTNESS, {OURS: [each.tightness for each in found]})
    report.add(labels, CERTIFIED, {OURS: [100.0 * certified / len(found)]})
    report.add(labels, FALLBACK, {OURS: [100.0 * fallbacks / len(found)]})
