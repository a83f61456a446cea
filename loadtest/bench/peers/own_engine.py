"""Our engine under measurement, as a plain class without HTTP.

    python -m lexshard.loadtest.bench.peers.own_engine FILE

runs the task in the file in a process of its own, to take turns with a peer that needs one, and
prints one JSON line, as `peers.beside_vllm.Worker` has it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.bench.engine_runs import EngineRun
from lexshard.loadtest.bench.frame import frozen_garbage
from lexshard.loadtest.bench.synthetic.jobs import Job

OPTIONS = ("dtype", "threads", "head", "draft", "draft_head")  # of ours, in a task, too


def configuration_of(model: str, asked: Mapping[str, Any]) -> EngineConfiguration:
    """Ours as the bench's options ask for it, on the CPU, where the peers are measured, and without
    prefix cache, so that repeated prompts are computed each time."""
    options = {name: asked[name] for name in OPTIONS}
    return EngineConfiguration(model, device="cpu", prefix_cache=False, **options)


class EngineRunner:
    """A warm engine."""

    def __init__(
        self,
        configuration: EngineConfiguration,
        sampling: SamplingParameters,
        name: str = "lexshard",
    ) -> None:
        self.name = name
        self._sampling = sampling
        self._drafts = configuration.draft is not None
        self._runs = 0  # other seeds in every run: one text says little of how often guesses stand
        self._engine = Engine(configuration, start_sampler)
        self._engine.warm_up()
        self.information = self._engine.information

    def run(self, jobs: Sequence[Job], seed: int | None = None) -> EngineRun:
        """``seed`` is that of the first job, the next one's is one more; without it they are others
        in every run."""
        if seed is None:
            seed = 1000 * self._runs
            self._runs += 1
        requests = []
        for index, job in enumerate(jobs):
            own = replace(
                self._sampling,
                seed=seed + index,
                max_tokens=job.output_tokens,
                grammar=job.grammar,
                ignore_eos=job.grammar is None,
            )
            requests.append(Request(str(index), 0, job.prompt_ids, own))
        token_ids: list[list[int]] = [[] for _ in jobs]
        token_seconds: list[list[float]] = [[] for _ in jobs]
        unfinished = len(jobs)
        before = self._parts()
        started = time.perf_counter()
        for request in requests:
            refusal = self._engine.submit(request)
            if refusal is not None:
                raise RuntimeError(f"request {request.request_id}: {refusal.error}")
        while unfinished:
            events = self._engine.step()
            now = time.perf_counter() - started
            for event in events:
                index = int(event.request_id)
                token_ids[index].extend(event.token_ids)
                token_seconds[index].extend([now] * len(event.token_ids))
                unfinished -= event.finish_reason is not None
        wall = time.perf_counter() - started
        shares = {part: (ended - before[part]) / wall for part, ended in self._parts().items()}
        return EngineRun(
            wall, tuple(map(tuple, token_ids)), tuple(map(tuple, token_seconds)), shares
        )

    def forced_share(self) -> float:
        """Of all tokens so far, those that a grammar forced."""
        told = self._engine.statistics()
        return told.forced_tokens / max(1, told.generated_tokens)

    def _parts(self) -> dict[str, float]:
        """Seconds spent in parts of the engine so far."""
        told = self._engine.statistics()
        parts = {"body": told.body_seconds, "head": told.head_seconds}
        parts["decisions"] = told.decide_seconds
        return {**parts, "drafting": told.draft_seconds} if self._drafts else parts


def main(path: str) -> None:
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    greedy = SamplingParameters(temperature=0.0)
    runner = EngineRunner(configuration_of(task["model"], task), greedy)
    cases = []
    for case in task["cases"]:
        jobs = [Job(tuple(job["prompt_ids"]), job["output_tokens"]) for job in case]
        runner.run(jobs)
        with frozen_garbage():
            cases.append([asdict(runner.run(jobs)) for _ in range(task["repeats"])])
    print(json.dumps({"versions": {}, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1])
