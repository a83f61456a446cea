"""lexshard in a process of its own, to take turns with a peer that needs one.

It reads the file that ``process_pairs`` wrote and prints one JSON line, in the format of
``peers/vllm_worker.py``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from lexshard.loadtest.bench.engine.runner import EngineRunner
from lexshard.loadtest.bench.runs import run_interleaved
from lexshard.loadtest.bench.workload import Job


def main(path: str) -> None:
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    names = ("model", "dtype", "threads", "body", "head", "tiers")
    drafting = {name: task[name] for name in ("draft", "draft_head")}
    runner = EngineRunner(*(task[name] for name in names), **drafting)
    cases = []
    for case in task["cases"]:
        jobs = [Job(tuple(job["prompt_ids"]), job["output_tokens"]) for job in case]
        runs = run_interleaved([runner], [jobs] * task["repeats"])[runner.name]
        cases.append([dataclasses.asdict(run) for run in runs])
    print(json.dumps({"versions": {}, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1])
