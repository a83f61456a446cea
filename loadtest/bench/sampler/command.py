"""``lexshard bench sampler``: from logits or certified candidates to tokens, beside vLLM's sampler.

The variants of SIMPLE's ablation (section 7.4), all on one core, taking turns run by run on the
same logits and histories:

- ``vllm``: vLLM's own Sampler in a process of its environment; ``naive torch``: our port of the
  same tensor program; ``parallel torch``: the port with one sampler per row.
- ``offloaded``: our sampler on all logits, vocabulary-major, with the block maxima their producer
  writes; ``offloaded + maxima``: the sampler computes those too; ``hot vocabulary``: hot tokens
  first, as many as the fitted cost model chooses.
- ``certified candidates``: our sampler on the tokens a certificate leaves; ``cold caches``: the
  same where other work has filled the processor's caches since its last step.

``--samplers`` measures several samplers at a time (see ``scaling``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from lexshard.loadtest.bench.measurement import (
    on_pinned_cores,
    run_measurement,
)
from lexshard.loadtest.bench.record import Report, percentile
from lexshard.loadtest.bench.sampler.case import (
    SamplerCase,
    candidates_per_row,
    steps_per_run,
    table,
)
from lexshard.loadtest.bench.sampler.contenders import (
    CandidateContender,
    DenseContender,
    SamplerContender,
    TorchContender,
    VllmContender,
)
from lexshard.loadtest.bench.sampler.hot_vocabulary import fitted_hot_ids
from lexshard.loadtest.bench.sampler.options import (
    CANDIDATES,
    COLD,
    HOT,
    NAIVE,
    OFFLOADED,
    PARALLEL,
    QUICK_RUNS,
    QUICK_VARIANTS,
    RUNS,
    VARIANTS,
    WITH_MAXIMA,
)
from lexshard.loadtest.bench.sampler.scaling import measure_scaling
from lexshard.loadtest.bench.sampler.settings import SETTINGS
from lexshard.loadtest.bench.sampler.vllm_process import VllmProcess, keep_freed_memory
from lexshard.loadtest.bench.sampler.workload import (
    POOL,
    Pool,
    SamplerWorkload,
    model_pool,
    synthetic_pool,
)

COMPARED = 2  # steps whose tokens are compared with the plain draw


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    keep_freed_memory()
    return run_measurement("sampler", arguments, measure, "tokens")


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on every contender; returns how many of our tokens were not the plain draw's."""
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    variants = arguments.variants or (QUICK_VARIANTS if arguments.quick else VARIANTS)
    sizes = (None,) if arguments.model is not None else arguments.vocabulary
    groups = [
        (SETTINGS[name], batch, history)
        for name in arguments.controls
        for batch in arguments.batch
        for history in arguments.history
    ]
    cases: list[SamplerCase] = []
    with (
        on_pinned_cores(report, 1) as cores,
        peer(arguments.vllm_python, cores) as vllm,
        tqdm(total=len(sizes) * len(groups), unit="case", disable=None) as bar,
    ):
        if vllm is not None:
            report.versions.update(vllm.versions)
        for size in sizes:
            pool = load_pool(arguments, size)
            tqdm.write(pool.describe())
            by_frequency = np.argsort(-pool.frequency, kind="stable").astype(np.int32)
            for setting, batch, history in groups:
                bar.set_description_str(f"V={pool.vocabulary_size} B={batch} {setting.name}")
                steps = (runs + 1) * steps_per_run(batch) + 1
                workload = SamplerWorkload(pool, setting, batch, history, steps, arguments.seed)
                case = measure_case(workload, variants, vllm, by_frequency, runs)
                case.compare_tokens(COMPARED)
                case.record(report)
                cases.append(case)
                bar.update()
    print(f"\n{table(cases)}\n")
    print_summary(cases, arguments)
    if arguments.samplers:
        shortest = [each for each in groups if each[2] == arguments.history[0]]
        print(f"\n{measure_scaling(report, arguments, shortest, runs, load_pool)}")
    return sum(case.compared - case.equal for case in cases)


@contextmanager
def peer(python: Path | None, cores: Sequence[int]) -> Iterator[VllmProcess | None]:
    """vLLM's process, if there is an interpreter that has it."""
    if python is None:
        yield None
        return
    with VllmProcess(python, cores, 1) as process:
        yield process


def load_pool(arguments: argparse.Namespace, vocabulary: int | None) -> Pool:
    """Rows of ``vocabulary`` logits, or a checkpoint's."""
    count = max(POOL, *arguments.batch)
    if vocabulary is None:
        return model_pool(arguments.model, count, arguments.seed)
    return synthetic_pool(vocabulary, count, arguments.seed)


def measure_case(
    workload: SamplerWorkload,
    variants: Sequence[str],
    vllm: VllmProcess | None,
    by_frequency: npt.NDArray[np.int32],
    runs: int,
) -> SamplerCase:
    """One case: the contenders that can decide it take turns."""
    setting = workload.setting
    contenders: list[SamplerContender] = [] if vllm is None else [VllmContender(vllm, workload)]
    case = SamplerCase(
        workload,
        labels={
            "logits": workload.pool.name,
            "V": workload.vocabulary_size,
            "controls": setting.name,
            "batch": workload.batch,
            "history": workload.history,
            "steps per run": steps_per_run(workload.batch),
        },
    )
    for name in variants:
        if name == NAIVE:
            contenders.append(TorchContender(workload))
        elif name == PARALLEL and workload.batch > 1:
            contenders.append(TorchContender(workload, split=True))
        elif name == OFFLOADED:
            contenders.append(DenseContender(OFFLOADED, workload))
        elif name == WITH_MAXIMA:
            contenders.append(DenseContender(WITH_MAXIMA, workload, maxima=False))
        elif name == HOT:
            hot = fitted_hot_ids(workload, by_frequency)
            case.hot_size = 0 if hot is None else len(hot)
            contenders.append(DenseContender(HOT, workload, hot=hot))
        elif name == CANDIDATES:
            contenders.append(CandidateContender(CANDIDATES, workload))
        elif name == COLD:
            contenders.append(CandidateContender(COLD, workload, cold=True))
    if CANDIDATES in variants or COLD in variants:
        case.candidates = candidates_per_row(workload)
    case.take_turns(contenders, runs)
    return case


def print_summary(cases: Sequence[SamplerCase], arguments: argparse.Namespace) -> None:
    """What the figures mean, what was equal, and what was not measured."""
    for name in dict.fromkeys(name for case in cases for name in case.sets):
        found = [(case, case.sets[name]) for case in cases if name in case.sets]
        rows, same = (sum(getattr(sets, key) for _, sets in found) for key in ("rows", "equal"))
        print(f"{name} and the port keep the same tokens in {same} of {rows} rows")
        for case, sets in found:
            if sets.equal < sets.rows:
                print(f"  {place(case)}: {sets}")
    equal, compared = sum(case.equal for case in cases), sum(case.compared for case in cases)
    print(f"our tokens equal to the plain draw from all adjusted logits: {equal} of {compared}")
    for line in history_lines(cases):
        print(line)
    print(NOTES)
    if arguments.vllm_python is None:
        print("vLLM's sampler: not measured, give --vllm-python PATH. faster: than naive torch.")


def place(case: SamplerCase) -> str:
    workload = case.workload
    return f"V={workload.vocabulary_size}, batch {workload.batch}, {workload.setting.name}"


def history_lines(cases: Sequence[SamplerCase]) -> list[str]:
    """What a longer history costs each contender, where several lengths were measured."""
    first: dict[tuple[object, ...], SamplerCase] = {}
    lines = []
    for case in cases:
        key = tuple(value for name, value in case.labels.items() if name != "history")
        shorter = first.setdefault(key, case)
        if shorter is case:
            continue
        costs = [
            f"{name} {percentile(times, 50) / percentile(shorter.milliseconds[name], 50):.2f}x"
            for name, times in case.milliseconds.items()
        ]
        lines.append(
            f"{place(case)}: a history of {case.workload.history:,} costs what one of "
            f"{shorter.workload.history:,} does, times: {', '.join(costs)}"
        )
    return lines


NOTES = """\
ms/row: median over runs of the time of a run's steps over their rows; largest step: of all steps,
the whole batch. tokens/s: of one sampler thread on one core. faster: median of the ratios of
neighbouring runs, above 1 where faster than vllm (or naive torch without it).
Ours are timed with all of Sampler.decide, deltas of the last step included, one step after another
as on a core of its own (but see cold caches). offloaded reads logits and block maxima that their
producer wrote; offloaded + maxima computes the maxima as well.
Sets may differ where tokens tie at the top-k boundary (torch keeps all of them, we exactly k) or
where fp32 sums in torch round a top-p or min-p boundary (ours are exact integers).
Not measured: the producer (forward, logits, the screen that leaves the candidates: bench head),
messages between processes (but see --samplers), logit bias, allow lists, bad words, returned
logprobs, vLLM's upkeep of its metadata between steps, and GPUs."""
