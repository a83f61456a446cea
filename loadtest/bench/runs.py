"""One timed run of a workload on one engine, and the measures taken from it."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lexshard.loadtest.bench.record import Measure
from lexshard.loadtest.bench.workload import Job

THROUGHPUT = Measure("throughput", "tokens/s", higher_is_better=True)
TIME_TO_FIRST_TOKEN = Measure("TTFT", "ms", higher_is_better=False)
TIME_PER_OUTPUT_TOKEN = Measure("TPOT", "ms", higher_is_better=False)


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
)


class Runner(Protocol):
    """An engine under measurement in this process."""

    @property
    def name(self) -> str: ...

    def run(self, jobs: Sequence[Job]) -> EngineRun:
        """Generate exactly the tokens every job asks for, ignoring end of sequence."""
        ...


def run_interleaved(
    runners: Sequence[Runner], workloads: Sequence[Sequence[Job]]
) -> dict[str, list[EngineRun]]:
    """A run of every runner on each workload, taking turns, after an unmeasured run of each on the
    first.

    Raises RuntimeError if an engine returns another number of tokens than it was asked for.
    """
    runs: dict[str, list[EngineRun]] = {runner.name: [] for runner in runners}
    gc.collect()
    gc.freeze()  # so that no contender pays for walking the imports of all
    try:
        for turn, jobs in enumerate((workloads[0], *workloads)):
            for runner in runners:
                run = runner.run(jobs)
                check_lengths(runner.name, run, jobs)
                if turn:
                    runs[runner.name].append(run)
    finally:
        gc.unfreeze()
    return runs


def check_lengths(name: str, run: EngineRun, jobs: Sequence[Job]) -> None:
    for index, (tokens, job) in enumerate(zip(run.token_ids, jobs, strict=True)):
        if len(tokens) != job.output_tokens:
            raise RuntimeError(
                f"{name} made {len(tokens)} of {job.output_tokens} tokens for request {index}"
            )
