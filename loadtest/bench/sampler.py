"""``lexshard bench sampler``: from logits or certified candidates to tokens, beside vLLM's sampler.

Variants (docs/benchmarks.md) take turns run by run on the same logits and histories, on one core.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import numpy as np
from tqdm import tqdm

from lexshard.loadtest.bench.contenders.sampler import (
    SamplerContender,
    Step,
    TorchSamplers,
    sampler_contenders,
)
from lexshard.loadtest.bench.frame import in_turns, run_bench
from lexshard.loadtest.bench.options.sampler import NAIVE, SETTINGS, VLLM
from lexshard.loadtest.bench.peers.beside_vllm import VllmSamplers, keep_freed_memory
from lexshard.loadtest.bench.record import CaseLabels, Measure, Ratio, Report, paired_ratio
from lexshard.loadtest.bench.synthetic.logits import (
    POOL,
    SamplerWorkload,
    synthetic_pool,
)

COMPARED = 2  # steps whose tokens are compared with the plain draw

TIME = Measure("time per row", "ms", higher_is_better=False)
LARGEST = Measure("largest step", "ms", higher_is_better=False)
SAME_SETS = Measure("rows with the sets of the port", "%", higher_is_better=True)
SAME_TOKENS = Measure("tokens equal to the plain draw", "%", higher_is_better=True)
NOTES = """\
time per row: that of a run's steps over their rows; in brackets how many times faster than vllm (or
naive torch without it). largest step: of a run, the whole batch. offloaded reads logits and block
maxima that their producer wrote; offloaded + maxima computes the maxima as well.
Sets may differ where tokens tie at the top-k boundary (torch keeps all of them, we exactly k) or
where fp32 sums in torch round a top-p or min-p boundary (ours are exact integers).
Not measured: the producer (bench head), messages between processes, logit bias, allow lists, bad
words, returned logprobs, vLLM's upkeep of its metadata between steps, and GPUs."""


def steps_per_run(batch: int) -> int:
    """Enough that a run of few rows is not a single moment."""
    return min(max(64 // batch, 2), 32)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    keep_freed_memory()
    return run_bench("sampler", arguments, measure, checked="tokens", threads=1)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on every contender; returns how many of our tokens were not the plain draw's."""
    groups = list(itertools.product(arguments.controls, arguments.batch, arguments.history))
    python, cores = arguments.vllm_python, report.machine["pinned_to_cores"]
    wrong = compared = 0
    with (
        nullcontext() if python is None else VllmSamplers(python, cores, 1) as vllm,
        tqdm(total=len(arguments.vocabulary) * len(groups), unit="case", disable=None) as bar,
    ):
        if vllm is not None:
            report.versions.update(vllm.versions)
        for size in arguments.vocabulary:
            pool = synthetic_pool(size, max(POOL, *arguments.batch), arguments.seed)
            for name, batch, history in groups:
                bar.set_description_str(f"V={pool.vocabulary_size} B={batch} {name}")
                steps = (arguments.runs + 1) * steps_per_run(batch) + 1
                settings = (SETTINGS[name], batch, history, steps, arguments.seed)
                workload = SamplerWorkload(pool, *settings)
                found = measure_case(report, workload, arguments.variants, vllm, arguments.runs)
                wrong, compared = wrong + found[0], compared + found[1]
                bar.update()
    equal = f"{compared - wrong} of {compared}"
    report.notes += [f"our tokens equal to the plain draw from all adjusted logits: {equal}", NOTES]
    if python is None:
        report.notes.append("vLLM's sampler: not measured, give --vllm-python PATH.")
    return wrong


def measure_case(
    report: Report,
    workload: SamplerWorkload,
    variants: Sequence[str],
    vllm: VllmSamplers | None,
    runs: int,
) -> tuple[int, int]:
    """One case: contenders take turns. How many of our tokens are wrong, and of how many."""
    contenders = sampler_contenders(workload, variants, vllm)
    size = steps_per_run(workload.batch)
    sets = {"ours": list[bool](), VLLM: list[bool]()}
    _compare_sets(workload, contenders, 0, sets)
    found = in_turns(
        {
            name: lambda turn, each=each: each.take(range((turn + 1) * size, (turn + 2) * size))  # type: ignore[misc]
            for name, each in contenders.items()
        },
        runs,
    )
    _compare_sets(workload, contenders, (runs + 1) * size, sets)
    wrong, compared = _compare_tokens(workload, found, size)
    labels = labels_of(workload)
    times = {
        name: [sum(ms for ms, _ in steps) / len(steps) / workload.batch for steps in of]
        for name, of in found.items()
    }
    report.add(labels, TIME, times)
    baseline = VLLM if VLLM in times else NAIVE
    for name in times:
        if baseline in times and name != baseline:
            ratio = paired_ratio(times[name], times[baseline], higher_is_better=False)
            case: CaseLabels = {**labels, "measure": TIME.name, "of": name}
            report.ratios.append(Ratio(case, baseline, ratio))
    largest = {name: [max(ms for ms, _ in steps) for steps in of] for name, of in found.items()}
    report.add(labels, LARGEST, largest)
    shares = {name: [100.0 * sum(same) / len(same)] for name, same in sets.items() if same}
    report.add(labels, SAME_SETS, shares)
    if compared:
        report.add(labels, SAME_TOKENS, {"lexshard": [100.0 * (compared - wrong) / compared]})
    return wrong, compared


def labels_of(workload: SamplerWorkload) -> CaseLabels:
    return {
        "V": workload.vocabulary_size,
        "controls": workload.setting.name,
        "batch": workload.batch,
        "history": workload.history,
        "steps per run": steps_per_run(workload.batch),
    }


def _compare_sets(
    workload: SamplerWorkload,
    contenders: Mapping[str, SamplerContender],
    step: int,
    sets: dict[str, list[bool]],
) -> None:
    """Row by row whether the port keeps the tokens in ``step`` that others keep."""
    port, vllm = contenders.get(NAIVE), contenders.get(VLLM)
    if workload.setting.greedy or not isinstance(port, TorchSamplers):
        return
    kept = port.kept(step)
    sets["ours"] += (kept == workload.kept(step)).all(axis=1).tolist()
    if isinstance(vllm, VllmSamplers):
        sets[VLLM] += (kept == vllm.kept()).all(axis=1).tolist()


def _compare_tokens(
    workload: SamplerWorkload, found: Mapping[str, Sequence[Sequence[Step]]], size: int
) -> tuple[int, int]:
    """How many of our tokens are not those of the plain draw, in the first measured steps, or not
    those of our first contender, in all others; and how many were compared."""
    drawn = [
        [tokens for steps in of for _, tokens in steps if tokens is not None]
        for of in found.values()
    ]
    wrong = compared = 0
    own = [tokens for tokens in drawn if tokens]
    for number in range(len(own[0]) if own else 0):
        plain = number < COMPARED
        expected = workload.plain_draw(size + number) if plain else own[0][number]
        for tokens in own if plain else own[1:]:
            wrong += int(np.count_nonzero(expected != tokens[number]))
            compared += len(expected)
    return wrong, compared
