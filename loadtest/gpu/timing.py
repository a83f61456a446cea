"""Times on a CUDA device: graphs replayed in turns, so that no clock or queue favours one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from loadtest.gpu.budget import Budget

Call = Callable[[], object]
WARM_UPS = 3
RUN_SECONDS = 0.02  # a run repeats a call for about so long


def captured(call: Call) -> Call:
    """``call`` as a CUDA graph; what it allocates stays alive with the graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def device_milliseconds(
    calls: Mapping[str, Call], runs: int, budget: Budget
) -> dict[str, list[float]]:
    """Per call the device time of one execution in each of up to ``runs`` runs, taken in turns.

    Stops early, after at least one run of each, when the budget is spent.
    """
    repeats = {name: _repeats(_device_run(call, 1)) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs):
        if turn and budget.spent:
            break
        for name, call in calls.items():
            times[name].append(_device_run(call, repeats[name]))
    return times


def wall_milliseconds(
    calls: Mapping[str, Call], runs: int, budget: Budget
) -> dict[str, list[float]]:
    """The same by the host's clock; every call must end with its result on the host."""
    repeats = {name: _repeats(_wall_run(call, 1)) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(runs):
        if turn and budget.spent:
            break
        for name, call in calls.items():
            times[name].append(_wall_run(call, repeats[name]))
    return times


def copy_bandwidth(budget: Budget) -> list[float]:
    """GB/s of a copy within the device, bytes read and bytes written counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = device_milliseconds({"copy": lambda: target.copy_(source)}, 9, budget)["copy"]
    return [2 * source.numel() / milliseconds / 1e6 for milliseconds in times]


def _repeats(milliseconds: float) -> int:
    return max(1, min(200, round(1e3 * RUN_SECONDS / max(milliseconds, 1e-3))))


def _device_run(call: Call, repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def _wall_run(call: Call, repeats: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return 1e3 * (time.perf_counter() - started) / repeats
