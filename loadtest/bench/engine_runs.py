"""One timed run of the engine benchmark on one engine, and what is recorded of such runs: measures,
shares of parts, and whether two engines write the same tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.jobs import Job

AGREEMENT = Measure("equal tokens", "%", higher_is_better=True)
THROUGHPUT = Measure("throughput", "tokens/s", higher_is_better=True)
TIME_TO_FIRST_TOKEN = Measure("TTFT", "ms", higher_is_better=False)
TIME_PER_OUTPUT_TOKEN = Measure("TPOT", "ms", higher_is_better=False)
DECODING = Measure("decoding", "tokens/s", higher_is_better=True)


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Tokens of each request and when each came, in seconds after all were submitted.

    ``wall_seconds`` ends with the last token, or where the engine hands back its result.
    ``shares`` are the shares of the wall time spent in parts of the engine, where they are known.
    """

    wall_seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    token_seconds: tuple[tuple[float, ...], ...]
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        """Generated tokens of all requests per second."""
        return sum(map(len, self.token_ids)) / self.wall_seconds

    @property
    def time_to_first_token(self) -> float:
        """Median over requests, in milliseconds."""
        return 1e3 * statistics.median(times[0] for times in self.token_seconds)

    @property
    def time_per_output_token(self) -> float:
        """Median over requests of the mean gap after the first token, in milliseconds."""
        return 1e3 * statistics.median(
            (times[-1] - times[0]) / (len(times) - 1) for times in self.token_seconds
        )

    @property
    def decoding(self) -> float:
        """Tokens per second from when all requests have begun until the first ends: no prompt is
        computed then. NaN where there is no such time."""
        begun = max(times[0] for times in self.token_seconds)
        ended = min(times[-1] for times in self.token_seconds)
        count = sum(begun < time <= ended for times in self.token_seconds for time in times)
        return count / (ended - begun) if ended > begun else math.nan

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> EngineRun:
        return cls(
            fields["wall_seconds"],
            tuple(map(tuple, fields["token_ids"])),
            tuple(map(tuple, fields["token_seconds"])),
            fields.get("shares", {}),
        )


MEASURES: tuple[tuple[Measure, Callable[[EngineRun], float]], ...] = (
    (THROUGHPUT, lambda run: run.throughput),
    (TIME_TO_FIRST_TOKEN, lambda run: run.time_to_first_token),
    (TIME_PER_OUTPUT_TOKEN, lambda run: run.time_per_output_token),
    (DECODING, lambda run: run.decoding),
)


class Runner(Protocol):
    """An engine under measurement in this process."""

    @property
    def name(self) -> str: ...

    def run(self, jobs: Sequence[Job]) -> EngineRun:
        """Generate exactly the tokens every job asks for, ignoring end of sequence."""
        ...


def check_lengths(name: str, run: EngineRun, jobs: Sequence[Job]) -> None:
    for index, (tokens, job) in enumerate(zip(run.token_ids, jobs, strict=True)):
        if len(tokens) != job.output_tokens:
            raise RuntimeError(
                f"{name} made {len(tokens)} of {job.output_tokens} tokens for request {index}"
            )


def add_measures(
    report: Report, labels: CaseLabels, groups: Mapping[str, Sequence[Sequence[EngineRun]]]
) -> None:
    """Record throughput, latencies and what our engines' parts took; group ``i`` of all is a pair.

    A group is what one turn measured: one run, or all runs of a process, which count with their
    median.
    """
    for measured, value in MEASURES:
        raw = {name: [_median(value, each) for each in turns] for name, turns in groups.items()}
        if not any(map(math.isnan, chain.from_iterable(raw.values()))):
            report.add(labels, measured, raw, ours="lexshard")
    for part in groups["lexshard"][0][0].shares:
        shares = {
            name: [_median(lambda run, of=part: 100 * run.shares[of], each) for each in turns]  # type: ignore[misc]
            for name, turns in groups.items()
            if part in turns[0][0].shares
        }
        report.add(labels, Measure(f"{part} share", "%", higher_is_better=False), shares)


def add_agreement(
    report: Report,
    labels: CaseLabels,
    pairs: Iterable[tuple[Sequence[Job], EngineRun, EngineRun]],
    against: str,
) -> None:
    """Record and print how many tokens of ``pairs`` of runs of some jobs, ours first, are equal.
    Runs that wrote what others did are not compared again."""
    compared = dict.fromkeys(
        (tuple(jobs), ours.token_ids, theirs.token_ids) for jobs, ours, theirs in pairs
    )
    found = [compare(ours, theirs) for _, ours, theirs in compared]
    equal = sum(each.equal_tokens for each in found)
    tokens = sum(each.tokens for each in found)
    parted = sum(each.parted for each in found)
    report.add(labels, AGREEMENT, {against: [100 * equal / tokens]})
    print(
        f"{labels['requests']} at once, lexshard and {against}: {equal} of {tokens} tokens are "
        f"equal, {parted} first difference{'' if parted == 1 else 's'}"
    )


def _median(value: Callable[[EngineRun], float], runs: Sequence[EngineRun]) -> float:
    return statistics.median(map(value, runs))


class Agreement(NamedTuple):
    """Tokens before each request's first difference, of all tokens, and how many requests have one:
    tokens after it follow other texts and are not compared."""

    equal_tokens: int
    tokens: int
    parted: int


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Agreement:
    """Compare outputs of the same requests, which have the same lengths."""
    equal = parted = 0
    for mine, other in zip(ours, theirs, strict=True):
        alike = [a == b for a, b in zip(mine, other, strict=True)]
        equal += (*alike, False).index(False)
        parted += not all(alike)
    return Agreement(equal, sum(map(len, ours)), parted)
