"""What a draft step's look at the vocabulary costs on one row: products alone, taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lexshard.kernels.draft.types import DraftHead, Router
from lexshard.kernels.linear import cpu
from lexshard.kernels.linear.tile import PANEL
from lexshard.loadtest.bench.draft.case import FULL, ROUTER, STATIC
from lexshard.loadtest.bench.record import Measure, Report

REPEATS = 200  # products of a run

PRODUCTS = Measure("products of a draft step", "us", higher_is_better=False)

Array = npt.NDArray[np.float32]


def record_costs(
    report: Report, full: DraftHead, routed: DraftHead, tokens: float, runs: int
) -> dict[str, list[float]]:
    """Microseconds of the full head, of the router's network, and of ``tokens`` rows.

    The rows of a shortlist are taken as one piece; gathering clusters is the drafting kernel's.
    """
    router = routed.router
    if router is None:
        raise ValueError("the second head has no router to be timed")
    depth = full.panels.shape[1]
    hidden = np.ones((1, depth), np.float32)
    inputs = np.ones((1, 2 * depth), np.float32)
    some = full.panels[: max(1, round(tokens / PANEL))]
    work = {
        FULL: _product(hidden, full.panels),
        f"{ROUTER}: its network": _network(inputs, router),
        f"{ROUTER}, {STATIC}: rows": _product(hidden, some),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(runs + 1):  # the first run compiles and warms up
        for name, once in work.items():
            started = time.perf_counter()
            for _ in range(REPEATS):
                once()
            elapsed = time.perf_counter() - started
            if number:
                times[name].append(1e6 * elapsed / REPEATS)
    report.add({"task": "one row"}, PRODUCTS, times)
    return times


def _product(
    x: Array, panels: npt.NDArray[np.float32] | npt.NDArray[np.uint16]
) -> Callable[[], None]:
    out = np.empty((1, len(panels) * PANEL), np.float32)
    return lambda: cpu.multiply(x, panels, out, False)


def _network(inputs: Array, router: Router) -> Callable[[], None]:
    middle = np.empty((1, len(router.inner) * PANEL), np.float32)
    scores = np.empty((1, len(router.outer) * PANEL), np.float32)

    def once() -> None:
        cpu.multiply(inputs, router.inner, middle, False)
        middle[0] += router.inner_bias
        middle[0] /= 1.0 + np.exp(-middle[0])
        cpu.multiply(middle, router.outer, scores, False)

    return once
