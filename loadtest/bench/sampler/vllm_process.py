"""vLLM's own Sampler beside ours: a process of its environment that takes turns with this one."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lexshard.loadtest.bench.process_pairs import vllm_worker
from lexshard.loadtest.bench.sampler.workload import Pool, SamplerWorkload

_ERROR_LINES = 15
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
# For the C library of the process, as `keep_freed_memory` does it in this one.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def keep_freed_memory() -> None:
    """Lets the C library keep what torch frees instead of handing it back and faulting it in again
    at every step, as the allocator does that vLLM's manual recommends. Both torch samplers run
    like that: it makes them up to twice as fast for large batches."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of the GNU C library
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


class VllmProcess:
    """The process; one case at a time is open in it. A context manager.

    Raises FileNotFoundError without such an interpreter, and RuntimeError with the end of its
    error output where the process fails.
    """

    def __init__(self, python: Path, cores: Sequence[int], threads: int) -> None:
        settings = vllm_worker(python, cores, threads).environment
        self._threads = threads
        self._folder = TemporaryDirectory()
        self._pool: Pool | None = None
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).parents[1] / "peers" / "vllm_sampler.py")],
            env={**os.environ, **settings, **KEEP_FREED_MEMORY},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: deque[str] = deque(maxlen=_ERROR_LINES)
        self._reader = Thread(target=self._errors.extend, args=(self._pipe("stderr"),))
        self._reader.start()
        self.versions: dict[str, str] = self._receive()["versions"]

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

    def run(self, steps: int) -> list[float]:
        """Seconds of each of the next ``steps`` steps."""
        seconds: list[float] = self.ask({"run": steps})["seconds"]
        return seconds

    def kept(self) -> npt.NDArray[np.bool_]:
        """The tokens [B, V] that are left in the next step."""
        self.ask({"kept": True})
        kept: npt.NDArray[np.bool_] = np.load(Path(self._folder.name) / "kept.npy")
        return kept

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command, answered."""
        pipe = self._pipe("stdin")
        try:
            pipe.write(json.dumps(command) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._receive()

    def __enter__(self) -> VllmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe("stdin").close()
        self._process.wait()
        self._reader.join()
        self._pipe("stdout").close()
        self._pipe("stderr").close()
        self._folder.cleanup()

    def _receive(self) -> dict[str, Any]:
        line = self._pipe("stdout").readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> RuntimeError:
        self._process.wait()
        self._reader.join()
        return RuntimeError("the vllm process failed:\n" + "".join(self._errors))

    def _pipe(self, name: str) -> IO[str]:
        pipe: IO[str] = getattr(self._process, name)
        return pipe
