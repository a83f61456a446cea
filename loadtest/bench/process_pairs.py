"""Two engines as whole processes that take turns, for a peer that needs its own environment."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lexshard.actors.configuration import DEFAULT_TIERS
from lexshard.loadtest.bench.runs import EngineRun, check_lengths
from lexshard.loadtest.bench.workload import Job

_ERROR_LINES = 15


@dataclass(frozen=True, slots=True)
class Task:
    """What both processes are asked to do; every case is run ``repeats`` times when warm."""

    model: str
    dtype: str
    threads: int
    body: str
    max_model_len: int
    cases: tuple[tuple[Job, ...], ...]
    repeats: int
    head: str = "auto"
    tiers: tuple[str, ...] = DEFAULT_TIERS
    draft: str | None = None
    draft_head: str = "auto"  # of ours
    draft_tokens: int = 0  # of a peer that does not choose by itself


@dataclass(frozen=True, slots=True)
class Worker:
    """A program that takes a task file as its last argument and prints one JSON line."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The versions a worker ran with and, per case, its runs."""

    versions: dict[str, str]
    cases: tuple[tuple[EngineRun, ...], ...]


def lexshard_worker() -> Worker:
    return Worker("lexshard", (sys.executable, "-m", "lexshard.loadtest.bench.engine.worker"), {})


def vllm_worker(python: Path, cores: Sequence[int], threads: int) -> Worker:
    """vLLM with the settings its manual recommends for CPUs, on the given cores.

    Raises FileNotFoundError if there is no such interpreter.
    """
    if not python.exists():
        raise FileNotFoundError(f"--vllm-python {python}: no such interpreter")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The ahead-of-time cache fails to load on the CPU, and every process would compile again.
        "VLLM_USE_AOT_COMPILE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    intel_openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if intel_openmp.exists():
        environment["LD_PRELOAD"] = str(intel_openmp)
    script = Path(__file__).parent / "peers" / "vllm_worker.py"
    return Worker("vllm", (str(python), str(script)), environment)


def alternate(workers: Sequence[Worker], tasks: Sequence[Task]) -> Iterator[list[WorkerReport]]:
    """Yields for every task one report of each worker, each from a fresh process.

    Raises RuntimeError with the end of its error output if a worker fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.json"
        for task in tasks:
            path.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
            yield [_run(worker, path, task) for worker in workers]


def _run(worker: Worker, path: Path, task: Task) -> WorkerReport:
    finished = subprocess.run(
        [*worker.command, str(path)],
        env={**os.environ, **worker.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        tail = "\n".join(finished.stderr.splitlines()[-_ERROR_LINES:])
        raise RuntimeError(f"the {worker.name} process failed:\n{tail}")
    fields = json.loads(finished.stdout.splitlines()[-1])
    report = WorkerReport(
        versions=fields["versions"],
        cases=tuple(tuple(map(EngineRun.from_json, runs)) for runs in fields["cases"]),
    )
    for jobs, runs in zip(task.cases, report.cases, strict=True):
        for run in runs:
            check_lengths(worker.name, run, jobs)
    return report
