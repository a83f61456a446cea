"""The engine as it serves on a GPU: bfloat16, the certified head there, the body in graphs or not.

The demo model is small, so what its steps take is what launching takes: graphs against none. The
share of tokens that depend on the batch is the body's; the head has no part in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.gpu.batch_dependence import batch_dependence, requests
from lexshard.loadtest.gpu.timing import Budget

MODEL = Path(__file__).resolve().parents[2] / "models/lexshard-demo"
STEP = Measure("step", "ms", higher_is_better=False)
DEPENDENT = Measure("tokens that depend on the batch", "of tokens", higher_is_better=False)

OTHERWISE = Measure("tokens that the host decides otherwise", "of tokens", higher_is_better=False)

SEQUENCES = (1, 16, 64)
STEPS = 64
RUNS = 5
COMPARED_SEQUENCES, COMPARED_TOKENS = 24, 64
GRAPHS, PLAIN, FIXED = "graphs", "without graphs", "graphs of one shape"
COMPILED = "graphs of compiled layers"
IN_TURN = "graphs, each step after the decisions of the one before"
FLASH = "graphs, attention by FlashInfer"


def measure_engine(report: Report, budget: Budget) -> list[str]:
    """Measures every way to compute the body; returns what did not fit the budget."""
    left_out: list[str] = []
    flash = (FLASH,) if find_spec("flashinfer") else ()
    for name in (GRAPHS, COMPILED, *flash, IN_TURN, PLAIN, FIXED):
        if budget.spent:
            left_out.append(f"engine, {name}")
            continue
        engine = _make_engine(name)
        with _without_graphs(engine.model.body) if name == PLAIN else nullcontext():
            _measure_steps(engine, name, report, budget, left_out)
            if engine.steps.draws_ahead:
                tell_of_the_device(engine, "engine", name, report)
            if budget.spent:
                left_out.append(f"engine, {name}: {DEPENDENT.name}")
            else:
                _measure_dependence(engine, name, report)
        engine.close()
    return left_out


def _make_engine(name: str) -> Engine:
    engine = Engine(
        EngineConfiguration(
            str(MODEL),
            device="cuda",
            head="certified",
            max_model_len=512,
            batch_invariant=name == FIXED,
            no_compile=name != COMPILED,
            attention="auto" if name == FLASH else "triton",
            prefix_cache=False,
        )
    )
    engine.steps.draws_ahead = name != IN_TURN
    return engine


@contextmanager
def _without_graphs(body: Any) -> Iterator[None]:
    if isinstance(body, GraphedBody):
        body.refusal = "to compare"
    yield


def _measure_steps(
    engine: Engine, name: str, report: Report, budget: Budget, left_out: list[str]
) -> None:
    """Milliseconds of a step of so many sequences, each of which draws a token."""
    for sequences in SEQUENCES:
        if budget.spent:
            left_out.append(f"engine, {name}: {sequences} sequences")
            continue
        asked = requests(4096, sequences, STEPS)
        run_to_completion(engine, asked)  # compiles, and makes graphs
        times = []
        for run in range(RUNS):
            if run and budget.spent:
                break
            started = time.perf_counter()
            run_to_completion(engine, asked)
            times.append(1e3 * (time.perf_counter() - started) / STEPS)
        report.add({"what": "engine", "sequences": sequences}, STEP, {name: times})


def tell_of_the_device(engine: Engine, what: str, name: str, report: Report) -> None:
    """How many of the tokens that the device drew were not those that the host decided then."""
    draws = engine.steps.device_draws
    case: CaseLabels = {"what": what, "decided": draws.decided}
    report.add(case, OTHERWISE, {name: [draws.wrong / max(draws.decided, 1)]})


def _measure_dependence(engine: Engine, name: str, report: Report) -> None:
    found = batch_dependence(engine, sequences=COMPARED_SEQUENCES, tokens=COMPARED_TOKENS)
    case: CaseLabels = {"what": "engine", "sequences": COMPARED_SEQUENCES}
    case["compared"] = found.compared
    report.add(case, DEPENDENT, {name: [found.different / found.compared]})
