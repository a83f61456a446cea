"""What the engine benchmark records of its runs: measures, shares of parts, and equal tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from lexshard.loadtest.bench.engine.agreement import compare
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.runs import MEASURES, EngineRun, Runner
from lexshard.loadtest.bench.workload import Job

AGREEMENT = Measure("equal tokens", "%", higher_is_better=True)


@runtime_checkable
class HasLogits(Protocol):
    """A runner that can say how close two next tokens are."""

    def logit_gap(self, token_ids: Sequence[int], first: int, second: int) -> float: ...


def add_measures(
    report: Report, labels: CaseLabels, groups: Mapping[str, Sequence[Sequence[EngineRun]]]
) -> None:
    """Record throughput, latencies and what our engines' parts took; group ``i`` of all is a pair.

    A group is what one turn measured: one run, or all runs of a process, which count with their
    median.
    """
    for measured, value in MEASURES:
        raw = {name: [_median(value, each) for each in turns] for name, turns in groups.items()}
        report.add(labels, measured, raw, ours="lexshard")
    for part in groups["lexshard"][0][0].shares:
        report.add(
            labels,
            Measure(f"{part} share", "%", higher_is_better=False),
            {
                name: [_median(partial(_percent, part=part), each) for each in turns]
                for name, turns in groups.items()
                if part in turns[0][0].shares
            },
        )


def add_agreement(
    report: Report,
    labels: CaseLabels,
    pairs: Iterable[tuple[Sequence[Job], EngineRun, EngineRun]],
    reference: Runner,
    *,
    against: str,
) -> None:
    """Record and print how many tokens of ``pairs`` of runs of some jobs, ours first, are equal,
    and how close the rest was where ``reference`` has a plain forward pass to tell. Runs that wrote
    what others did are not compared again."""
    compared = dict.fromkeys(
        (tuple(jobs), ours.token_ids, theirs.token_ids) for jobs, ours, theirs in pairs
    )
    found = [(jobs, ours, compare(ours, theirs)) for jobs, ours, theirs in compared]
    equal = sum(each.equal_tokens for _, _, each in found)
    tokens = sum(each.tokens for _, _, each in found)
    parted = sum(len(each.differences) for _, _, each in found)
    report.add(labels, AGREEMENT, {against: [100 * equal / tokens]})
    print(
        f"{labels['requests']} at once, lexshard and {against}: {equal} of {tokens} tokens are "
        f"equal, {parted} first difference{'' if parted == 1 else 's'}"
    )
    if not isinstance(reference, HasLogits):
        return
    for jobs, ours, agreement in found:
        for each in agreement.differences:
            prefix = (*jobs[each.request].prompt_ids, *ours[each.request][: each.position])
            gap = reference.logit_gap(prefix, each.ours, each.theirs)
            print(
                f"  request {each.request} parts at token {each.position}: {each.ours} and "
                f"{each.theirs}, whose logits in the plain forward are {gap:.2g} apart"
            )


def _percent(run: EngineRun, part: str) -> float:
    return 100 * run.shares[part]


def _median(value: Callable[[EngineRun], float], runs: Sequence[EngineRun]) -> float:
    return statistics.median(map(value, runs))
