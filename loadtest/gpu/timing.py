"""Times on a CUDA device: graphs replayed in turns, so that no clock favours one of them; and time
for a whole run and for each of its parts, so that a run ends when it promised to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

Call = Callable[[], object]
WARM_UPS = 3
RUN_SECONDS = 0.02  # a run repeats a call for about so long
MOST_REPEATS = 200
COPIED_BYTES = 1 << 30


class Budget:
    """``seconds`` from now on; parts of it end no later than the whole."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end, 0 when it has passed."""
        return max(0.0, self._end - self._clock())

    @property
    def spent(self) -> bool:
        return self.left == 0.0

    def part(self, seconds: float) -> Budget:
        """A budget of at most ``seconds`` inside this one."""
        return Budget(min(seconds, self.left), self._clock)


class Timer(Protocol):
    """How calls on one device are prepared and timed."""

    device: str

    def captured(self, call: Call) -> Call:
        """``call`` in the form in which its device time is measured."""
        ...

    def device_run(self, call: Call, repeats: int) -> float:
        """Milliseconds on the device of one of ``repeats`` calls in a row."""
        ...

    def wall_run(self, call: Call, repeats: int) -> float:
        """The same by the host's clock; the call ends with its result on the host."""
        ...


class CudaTimer:
    """CUDA graphs between events."""

    device = "cuda"

    def captured(self, call: Call) -> Call:
        """What ``call`` allocates stays alive with the graph."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Call = graph.replay
        return replay

    def device_run(self, call: Call, repeats: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        for _ in range(repeats):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / repeats

    def wall_run(self, call: Call, repeats: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return 1e3 * (time.perf_counter() - started) / repeats


def in_turns(
    run: Callable[[Call, int], float], calls: Mapping[str, Call], runs: int, budget: Budget
) -> dict[str, list[float]]:
    """Per call the milliseconds of one execution in each of up to ``runs`` runs, taken in turns.

    ``run`` is a timer's. Stops early, after at least one turn, when the budget is spent.
    """
    repeats = {name: _repeats(run(call, 1)) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs):
        if turn and budget.spent:
            break
        for name, call in calls.items():
            times[name].append(run(call, repeats[name]))
    return times


def copy_bandwidth(timer: Timer, budget: Budget, runs: int = 9) -> list[float]:
    """GB/s of a copy within the device, bytes read and bytes written counted."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source)}
    times = in_turns(timer.device_run, calls, runs, budget)["copy"]
    return [2 * source.numel() / milliseconds / 1e6 for milliseconds in times]


def _repeats(milliseconds: float) -> int:
    return max(1, min(MOST_REPEATS, round(1e3 * RUN_SECONDS / max(milliseconds, 1e-3))))
