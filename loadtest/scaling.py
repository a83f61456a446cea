"""What more cores would give one request on a CPU: a model of three figures that are measured here.

    python -m lexshard.loadtest.scaling --model models/lexshard-demo --dtype bfloat16

Measured: steps of one request with one thread and with two; how fast one and two read weights in a
product of one row, which is what they share, so that the part that is shared follows; and what it
takes two to meet. The rest is arithmetic and assumption, and says so:

    step(n) = alone + max(shared / n, bytes / (B * rate)) + meetings * n * meeting / 2

where B is how many cores it takes to read as fast as the memory can (``--cores-of-bandwidth``), as
if every step read all weights from there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numba import njit
from safetensors import safe_open
from transformers import AutoTokenizer

from lexshard.actors.configuration import DataType, EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.cluster.samplers.start import start_sampler
from lexshard.kernels import pool
from lexshard.kernels.linear.cpu import multiply_in_team
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.team.jobs import run, wait_for_all
from lexshard.loadtest.bench.synthetic.jobs import story_tokens
from lexshard.loadtest.bench.synthetic.random_model import write_random_model

CORES = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT, TOKENS = 64, 160
MOST_READ = 1 << 27  # bytes, more than caches hold
COLUMNS = 1024  # of what is read
MEETINGS = 20_000
MEETINGS_PER_LAYER = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a step of one request with one thread and with two and of two threads' meeting,
    and the bytes that a step reads and that one thread and two read a second."""

    one: float
    two: float
    meeting: float
    meetings: int  # of a step
    bytes: int
    rate: float
    rate_of_two: float

    @property
    def gain(self) -> float:
        """How much faster two threads here are than one at what they share: reading."""
        return min(2.0, max(1.01, self.rate_of_two / self.rate))

    @property
    def shared(self) -> float:
        """Seconds of one thread that threads share, by what two save; never more than a step
        takes."""
        saved = max(0.0, self.one - self.two + self.meetings * self.meeting)
        return min(self.one, saved / (1.0 - 1.0 / self.gain))

    def step(self, cores: int, cores_of_bandwidth: float) -> float:
        """The model's seconds of a step."""
        least = min(self.shared, self.bytes / (cores_of_bandwidth * self.rate))
        meeting = self.meetings * self.meeting * cores / 2 if cores > 1 else 0.0
        return self.one - self.shared + max(self.shared / cores, least) + meeting


@njit(nogil=True)
def _meet(rank, size, team, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        wait_for_all(team, size)


@njit(nogil=True)
def _meet_often(team, size, times):  # type: ignore[no-untyped-def]
    run(team, size, _meet, (team, times))


def meeting_seconds() -> float:
    """For two threads to meet, the fastest of a few turns."""
    pool.set_threads(2)
    pool.begin_step(1)
    team, size = pool.team()
    _meet_often(team, size, 10)
    return _fastest(lambda: _meet_often(team, size, MEETINGS)) / MEETINGS


def reading_rate(size: int, threads: int) -> float:
    """Bytes of weights, of ``size`` in all, that so many threads read a second in a product with
    one row."""
    pool.set_threads(threads)
    pool.begin_step(1)
    panels = max(threads, min(size, MOST_READ) // (2 * COLUMNS * PANEL))
    weight = np.ones((panels, COLUMNS, PANEL), np.uint16)
    row, out = np.ones((1, COLUMNS), np.float32), np.empty((1, panels * PANEL), np.float32)
    multiply_in_team(*pool.team(), row, weight, out)
    return weight.nbytes / _fastest(lambda: multiply_in_team(*pool.team(), row, weight, out))


def _fastest(call: Callable[[], None], turns: int = 7) -> float:
    taken: list[float] = []
    for _ in range(turns):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def step_seconds(model: Path, dtype: DataType, threads: int) -> float:
    """The median step of one sampled request."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    configuration = EngineConfiguration(
        str(model),
        dtype=dtype,
        device="cpu",
        threads=threads,
        max_model_len=PROMPT + TOKENS,
        steps_at_once=1,  # one is timed
    )
    engine = Engine(configuration, start_sampler)
    try:
        engine.warm_up()
        parameters = SamplingParameters(max_tokens=TOKENS, seed=1, ignore_eos=True)
        prompt = tuple(story_tokens(tokenizer)[:PROMPT])
        assert engine.submit(Request("scaling", 0, prompt, parameters)) is None
        taken: list[float] = []
        ended = False
        while not ended:
            began = time.perf_counter()
            ended = any(event.finish_reason for event in engine.step())
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[4:-4])
    finally:
        engine.close()


def measure(model: Path, dtype: DataType) -> Measured:
    one = step_seconds(model, dtype, 1)
    two = step_seconds(model, dtype, 2)
    layers, size = 0, 0
    for each in model.glob("*.safetensors"):
        with safe_open(each, "np") as weights:
            layers += sum(name.endswith("input_layernorm.weight") for name in weights.keys())  # noqa: SIM118
        size += each.stat().st_size
    meetings = MEETINGS_PER_LAYER * layers + 2
    rates = reading_rate(size, 1), reading_rate(size, 2)
    return Measured(one, two, meeting_seconds(), meetings, size, *rates)


def told(measured: Measured, cores_of_bandwidth: float) -> str:
    """The figures, then the model."""
    lines = [
        f"measured, on a machine of {os.cpu_count()} cores:",
        f"  a step of one request: {1e3 * measured.one:.2f} ms with one thread, "
        f"{1e3 * measured.two:.2f} ms with two",
        f"  reading weights: {measured.rate / 1e9:.1f} GB/s with one thread, "
        f"{measured.rate_of_two / 1e9:.1f} with two; {measured.bytes / 1e6:,.0f} MB of them",
        f"  two threads meet in {1e6 * measured.meeting:.2f} us, {measured.meetings} times a step",
        f"  so {100 * (1 - measured.shared / measured.one):.0f}% of a step is in one thread",
        f"modelled, where {cores_of_bandwidth:g} cores read as fast as memory can:",
    ]
    for cores in CORES:
        seconds = measured.step(cores, cores_of_bandwidth)
        lines.append(
            f"  {cores:4} cores: {1e3 * seconds:7.2f} ms a step, {measured.one / seconds:5.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/lexshard-demo"))
    parser.add_argument("--random", action="store_true", help="268M random weights, V = 262,144")
    parser.add_argument("--dtype", choices=get_args(DataType), default="auto")
    parser.add_argument("--cores-of-bandwidth", type=float, default=10.0, metavar="B")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.random:
            model = Path(folder)
            write_random_model(model)
        print(told(measure(model, arguments.dtype), arguments.cores_of_bandwidth))


if __name__ == "__main__":
    main()
