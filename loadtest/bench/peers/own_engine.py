"""Our engine under measurement, as a plain class without HTTP.

    python -m lexshard.loadtest.bench.peers.own_engine FILE

runs the task in the file in a process of its own, to take turns with a peer that needs one, and
prints one JSON line, in the format of ``vllm_worker.py``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lexshard.actors.configuration import (
    DEFAULT_TIERS,
    BodyChoice,
    DataType,
    DraftHeadChoice,
    EngineConfiguration,
    HeadChoice,
    TierName,
)
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.bench.engine_runs import EngineRun
from lexshard.loadtest.bench.frame import frozen_garbage
from lexshard.loadtest.bench.synthetic.jobs import Job


class EngineRunner:
    """A warm engine without prefix cache, so that repeated prompts are computed each time."""

    def __init__(
        self,
        model: str,
        dtype: DataType,
        threads: int,
        body: BodyChoice,
        head: HeadChoice = "auto",
        tiers: Sequence[TierName] = DEFAULT_TIERS,
        *,
        name: str = "lexshard",
        samplers: int = 0,
        draft: str | None = None,
        draft_head: DraftHeadChoice = "auto",
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        self.name = name
        self._sampling = SamplingParameters(
            temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True
        )
        self._drafts = draft is not None
        self._runs = 0  # other seeds in every run: one text says little of how often guesses stand
        self._engine = Engine(
            EngineConfiguration(
                model=model,
                dtype=dtype,
                device="cpu",  # where the peers are measured
                threads=threads,
                body=body,
                head=head,
                tiers=tuple(tiers),
                prefix_cache=False,
                samplers=samplers,
                draft=draft,
                draft_head=draft_head,
            ),
            start_sampler,
        )
        self._engine.warm_up()
        self.information = self._engine.information

    def run(self, jobs: Sequence[Job]) -> EngineRun:
        requests = [
            Request(
                request_id=str(index),
                choice=0,
                prompt_ids=job.prompt_ids,
                parameters=replace(
                    self._sampling,
                    seed=1000 * self._runs + index,
                    max_tokens=job.output_tokens,
                ),
            )
            for index, job in enumerate(jobs)
        ]
        self._runs += 1
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
        return EngineRun(
            wall_seconds=wall,
            token_ids=tuple(map(tuple, token_ids)),
            token_seconds=tuple(map(tuple, token_seconds)),
            shares={
                part: (seconds - before[part]) / wall for part, seconds in self._parts().items()
            },
        )

    def _parts(self) -> dict[str, float]:
        """Seconds spent in parts of the engine so far."""
        told = self._engine.statistics()
        parts = {
            "body": told.body_seconds,
            "head": told.head_seconds,
            "decisions": told.decide_seconds,
        }
        return {**parts, "drafting": told.draft_seconds} if self._drafts else parts


def main(path: str) -> None:
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    names = ("model", "dtype", "threads", "body", "head", "tiers")
    drafting = {name: task[name] for name in ("draft", "draft_head")}
    runner = EngineRunner(*(task[name] for name in names), **drafting)
    cases = []
    for case in task["cases"]:
        jobs = [Job(tuple(job["prompt_ids"]), job["output_tokens"]) for job in case]
        runner.run(jobs)
        with frozen_garbage():
            cases.append([asdict(runner.run(jobs)) for _ in range(task["repeats"])])
    print(json.dumps({"versions": {}, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1])
