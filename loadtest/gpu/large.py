"""The engine at the size it is for: Llama 3.1 8B's shape in bfloat16, with random weights.

No step is sooner than reading every weight once, so its time stands beside that: the bytes of the
weights, at the rate at which this device copies. What weights mean changes no step's time but by
the rows that the certified head rescores, which are printed.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from lexshard.actors.configuration import AttentionChoice, Device, EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.random_model import write_random_model
from lexshard.loadtest.gpu.engine import STEP, tell_of_the_device
from lexshard.loadtest.gpu.head import FALLBACKS, RESCORED
from lexshard.loadtest.gpu.timing import Budget

SHAPE = "Llama 3.1 8B, random"
SIZES: dict[str, Any] = {
    "hidden_size": 4_096,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": False,
}
IN_MEMORY = Path("/dev/shm")  # 16 GB: reading them from a disk is not what is measured
LONGEST = 4_096
STEPS = 32
IN_TURN = 5  # of the cases also when each step follows the decisions of the last
ATTENTION: dict[str, AttentionChoice] = {"our attention": "triton", "FlashInfer": "auto"}
RUNS = 3
LOWEST_ID = 5  # beyond what ends a sequence
START = Measure("start", "s", higher_is_better=False)
PROMPTS = Measure("prompts", "tokens/s", higher_is_better=True)
FLOOR = "weights read once"


class Decoding(NamedTuple):
    """So many sequences that go on from so long a text each."""

    sequences: int
    context: int
    wish: str

    @property
    def sampling(self) -> SamplingParameters:
        greedy, nucleus = self.wish == "greedy", self.wish == "top-p 0.95"
        return SamplingParameters(
            temperature=0.0 if greedy else 0.8,
            top_p=0.95 if nucleus else 1.0,
            max_tokens=LONGEST // 4,  # more than are waited for
            ignore_eos=True,
            logprobs=5 if self.wish == "log-probabilities" else None,
        )


DECODING = (
    Decoding(1, 32, "sampled"),
    Decoding(16, 32, "sampled"),
    Decoding(64, 32, "sampled"),
    Decoding(64, 32, "greedy"),
    Decoding(64, 32, "top-p 0.95"),
    Decoding(1, 3_000, "sampled"),
    Decoding(64, 1_024, "sampled"),
    Decoding(64, 32, "log-probabilities"),
)


def measure_large(
    report: Report,
    budget: Budget,
    copies: float,
    *,
    device: Device = "cuda",
    sizes: dict[str, Any] = SIZES,
) -> list[str]:
    """Measures what fits the budget, and returns what did not. ``copies``: GB/s that the device
    copies, read plus written."""
    left_out: list[str] = []
    floor = 1e3 * bytes_read(sizes) / (1e9 * copies)
    with TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        write_random_model(Path(folder), device=device, **sizes)
        _free_memory()
        for name, attention in ATTENTION.items():
            if attention == "auto" and find_spec("flashinfer") is None:
                continue
            if budget.spent:
                left_out.append(f"{SHAPE}: {name}")
                continue
            engine = _started(folder, name, attention, device, report)
            _measure_engine(engine, name, floor, report, budget, left_out)
            engine.close()
            del engine
            _free_memory()
    return left_out


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _measure_engine(
    engine: Engine,
    name: str,
    floor: float,
    report: Report,
    budget: Budget,
    left_out: list[str],
) -> None:
    for case in DECODING:
        if budget.spent:
            left_out.append(f"{SHAPE}: {name}, {case.sequences} x {case.context}, {case.wish}")
            continue
        _measure_decoding(engine, name, case, floor, report, budget)
    _tell_of_the_head(engine, name, report)
    engine.steps.draws_ahead = False
    for case in DECODING[:IN_TURN]:
        if not budget.spent:
            _measure_decoding(engine, f"{name}, in turn", case, floor, report, budget)


def bytes_read(sizes: dict[str, Any]) -> int:
    """Bytes of all weights but the embeddings', of which a step reads a row per token."""
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    heads = 2 * sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]
    layer = hidden * (heads * width + 3 * sizes["intermediate_size"])
    numbers = sizes["num_hidden_layers"] * layer + hidden * sizes["vocab_size"]
    return int(2 * numbers)


def _started(
    folder: str, name: str, attention: AttentionChoice, device: Device, report: Report
) -> Engine:
    started = time.perf_counter()
    engine = Engine(
        EngineConfiguration(
            folder,
            device=device,
            head="certified",
            attention=attention,
            max_model_len=LONGEST,
            max_running=max(case.sequences for case in DECODING),
            prefix_cache=False,
            steps_at_once=1,  # which a GPU has anyway
        )
    )
    loaded = time.perf_counter()
    engine.warm_up()
    times = {"loaded": loaded - started, "warmed up": time.perf_counter() - loaded}
    print(f"{SHAPE}, {name}: {times}", flush=True)
    for part, seconds in times.items():
        report.add({"what": SHAPE, "start": part}, START, {name: [seconds]})
    return engine


def _measure_decoding(
    engine: Engine, name: str, case: Decoding, floor: float, report: Report, budget: Budget
) -> None:
    steps, rates = [], []
    for run in range(1 + RUNS):
        if run > 1 and budget.spent:
            break
        prompt_seconds, step_seconds = _decode(engine, case, seed=run)
        if run:  # the first may still compile
            rates.append(case.sequences * case.context / prompt_seconds)
            steps.append(1e3 * step_seconds)
    labels: CaseLabels = {
        "what": SHAPE,
        "sequences": case.sequences,
        "context": case.context,
        "wish": case.wish,
    }
    report.add(labels, STEP, {name: steps, FLOOR: [floor] * len(steps)}, ours=name)
    report.add(labels, PROMPTS, {name: rates})


def _decode(engine: Engine, case: Decoding, seed: int) -> tuple[float, float]:
    """Seconds until every sequence has a token, and seconds of a step from then on."""
    random = np.random.default_rng(seed)
    prompts = random.integers(LOWEST_ID, 4096, (case.sequences, case.context))
    started = time.perf_counter()
    for number, prompt in enumerate(prompts.tolist()):
        sampling = replace(case.sampling, seed=number)
        engine.submit(Request(f"large-{number}", 0, tuple(prompt), sampling))
    waiting = {f"large-{number}" for number in range(case.sequences)}
    while waiting:
        waiting -= {event.request_id for event in engine.step() if event.token_ids}
    begun = time.perf_counter()
    drawn = 0
    while drawn < STEPS * case.sequences:  # a step may leave some sequences to the next one
        drawn += sum(len(event.token_ids) for event in engine.step())
    ended = time.perf_counter()
    for number in range(case.sequences):
        engine.cancel(f"large-{number}")
    return begun - started, (ended - begun) * case.sequences / drawn


def _tell_of_the_head(engine: Engine, name: str, report: Report) -> None:
    counters = engine.steps.counters
    rows = max(counters.head_rows, 1)
    labels: CaseLabels = {"what": SHAPE, "rows": rows}
    report.add(labels, RESCORED, {name: [counters.head_rescored_rows / rows]})
    report.add(labels, FALLBACKS, {name: [counters.head_fallbacks / rows]})
    if engine.steps.draws_ahead:
        tell_of_the_device(engine, SHAPE, name, report)
