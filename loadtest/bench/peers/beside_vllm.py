"""vLLM beside ours, in processes of its own environment: its engine, and its sampler alone."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from lexshard.loadtest.bench.synthetic.logits import Pool, SamplerWorkload

HERE = Path(__file__).parent
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# For the C library of the process, as `keep_freed_memory` does it in this one.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_SHOWN = 2000  # characters of what a process that failed said


def vllm_environment(python: Path, cores: Sequence[int], threads: int) -> dict[str, str]:
    """The settings that vLLM's manual recommends for CPUs, on the given cores.

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
        # It looks at a model with `python -m`, which in a clone of ours would find our `kernels`.
        "PYTHONSAFEPATH": "1",
        # In place of the allocator that it warns about, which is not everywhere.
        **KEEP_FREED_MEMORY,
    }
    intel_openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if intel_openmp.exists():
        own = filter(None, (os.environ.get("LD_PRELOAD"), str(intel_openmp)))
        environment["LD_PRELOAD"] = ":".join(own)
    return environment


# -- engines, process by process ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Worker:
    """Runs a task in a fresh process: versions and, for every case of the task, its runs. Raises
    RuntimeError with the end of its error output where the process fails."""

    name: str
    run: Callable[[Mapping[str, Any]], dict[str, Any]]


def program(name: str, *command: str) -> Worker:
    """One that takes a task file as its last argument and prints one line of JSON."""

    def run(task: Mapping[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "task.json"
            path.write_text(json.dumps(task), encoding="utf-8")
            finished = subprocess.run([*command, str(path)], capture_output=True, text=True)
        if finished.returncode:
            raise RuntimeError(f"the {name} process failed:\n{finished.stderr[-_SHOWN:]}")
        told: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
        return told

    return Worker(name, run)


def lexshard_worker() -> Worker:
    return program("lexshard", sys.executable, "-m", "lexshard.loadtest.bench.peers.own_engine")


def vllm_worker(python: Path, cores: Sequence[int], threads: int) -> Worker:
    """Compilation stays on and prefix caching is off; one run of every case warms up. Raises as
    `vllm_environment` does."""
    environment = vllm_environment(python, cores, threads)

    def run(task: Mapping[str, Any]) -> dict[str, Any]:
        draft = {
            "method": "draft_model",
            "model": task["draft"],
            "num_speculative_tokens": task["draft_tokens"],
        }
        load = {
            "model": task["model"],
            "speculative_config": None if task["draft"] is None else draft,
            "dtype": task["dtype"],
            "enable_prefix_caching": False,
            "max_model_len": task["max_model_len"],
            "max_num_seqs": max(map(len, task["cases"])),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
        }
        cases = []
        with VllmProcess(python, "vllm_steps.py", environment) as process:
            process.ask({"load": load})
            for case in task["cases"]:
                lengths = [{"temperature": 0.0, "max_tokens": job["output_tokens"]} for job in case]
                prompts = [job["prompt_ids"] for job in case]
                asked = {"prompts": prompts, "parameters": lengths, "moments": True}
                cases.append([process.ask(asked) for _ in range(task["repeats"] + 1)][1:])
            return {"versions": process.versions, "cases": cases}

    return Worker("vllm", run)


def alternate(
    workers: Sequence[Worker], tasks: Sequence[Mapping[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Yields for every task what each worker told. Raises as they do."""
    for number, task in enumerate(tasks):
        turn = -1 if number % 2 else 1  # who goes first
        yield [worker.run(task) for worker in workers[::turn]][::turn]


# -- its sampler, step by step --------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Lets the C library keep what torch frees instead of handing it back and faulting it in again
    at every step, as the allocator does that vLLM's manual recommends. Both torch samplers run
    like that: it makes them up to twice as fast for large batches."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of the GNU C library
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


class VllmProcess:
    """A program that vLLM's interpreter runs, which answers a line of JSON with one. A context
    manager.

    ``program`` is a file beside this one; it tells its versions first. Raises FileNotFoundError
    without such an interpreter, and RuntimeError with the end of its error output where the process
    fails.
    """

    def __init__(self, python: Path, program: str, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._said = (Path(self._folder.name) / "said").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [str(python), str(HERE / program)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self.versions: dict[str, str] = self._receive()["versions"]

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command, answered."""
        pipe = self._pipe("stdin")
        try:
            pipe.write(json.dumps(command) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe("stdin").close()
        self._process.wait()
        self._pipe("stdout").close()
        self._said.close()
        self._folder.cleanup()

    def _receive(self) -> dict[str, Any]:
        while not (line := self._pipe("stdout").readline()).startswith("{"):
            if not line:
                raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> RuntimeError:
        self._process.wait()
        self._said.seek(0)
        return RuntimeError("the vllm process failed:\n" + self._said.read()[-_SHOWN:])

    def _pipe(self, name: str) -> IO[str]:
        pipe: IO[str] = getattr(self._process, name)
        return pipe


class VllmSamplers(VllmProcess):
    """A process with vLLM's Sampler, in which one case at a time is open. Raises as `VllmProcess`
    does."""

    def __init__(self, python: Path, cores: Sequence[int], threads: int) -> None:
        settings = vllm_environment(python, cores, threads)
        self._threads = threads
        self._pool: Pool | None = None
        super().__init__(python, "vllm_sampler.py", settings)

    def open(self, workload: SamplerWorkload) -> None:
        """Makes ``workload`` the case to run, from its first step."""
        folder = Path(self._folder.name)
        if workload.pool is not self._pool:
            np.save(folder / "rows.npy", workload.pool.rows)
            self._pool = workload.pool
        for name in ("prompts", "outputs", "places", "appended"):
            np.save(folder / f"{name}.npy", getattr(workload, name))
        setting = dataclasses.asdict(workload.setting)
        self.ask({"open": str(folder), "setting": setting, "threads": self._threads})

    def take(self, steps: range) -> list[tuple[float, npt.NDArray[np.int64] | None]]:
        """Milliseconds of each of the next steps."""
        return [(1e3 * each, None) for each in self.ask({"run": len(steps)})["seconds"]]

    def kept(self) -> npt.NDArray[np.bool_]:
        """The tokens [B, V] that are left in the next step."""
        self.ask({"kept": True})
        kept: npt.NDArray[np.bool_] = np.load(Path(self._folder.name) / "kept.npy")
        return kept
