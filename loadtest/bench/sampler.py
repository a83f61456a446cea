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
- ``mixture``: the paper's draw, for information.

``--samplers`` measures several samplers at a time (see ``sampler_scaling``).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from kernels import pool as threads
from loadtest.bench.machine import describe_machine, installed_versions, pinned_to_cores
from loadtest.bench.record import Report, percentile
from loadtest.bench.sampler_cell import Cell, candidates_per_row, steps_per_run, table
from loadtest.bench.sampler_hot import fitted_hot_vocabulary, mixture_hot_ids
from loadtest.bench.sampler_peer import VllmProcess, keep_freed_memory
from loadtest.bench.sampler_scaling import measure_scaling
from loadtest.bench.sampler_scene import POOL, Pool, Scene, model_pool, synthetic_pool
from loadtest.bench.sampler_settings import SETTINGS
from loadtest.bench.sampler_sides import (
    CANDIDATES,
    COLD,
    HOT,
    MIXTURE,
    NAIVE,
    OFFLOADED,
    PARALLEL,
    WITH_MAXIMA,
    CandidateSide,
    DenseSide,
    MixtureSide,
    Side,
    TorchSide,
    VllmSide,
)

RUNS, QUICK_RUNS = 9, 3
COMPARED = 2  # steps whose tokens are compared with the plain draw
SEED = 17
VOCABULARY, BATCH, HISTORY = (151_936,), (1, 8, 32), (400,)
CONTROLS = ("all", "none")
VARIANTS = (NAIVE, PARALLEL, OFFLOADED, WITH_MAXIMA, HOT, CANDIDATES, COLD, MIXTURE)
QUICK_VARIANTS = (NAIVE, OFFLOADED, WITH_MAXIMA, HOT, CANDIDATES, COLD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--vocabulary", "-V", type=_numbers, default=VOCABULARY, metavar="N,N")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint's own logits instead, its own V"
    )
    parser.add_argument("--batch", type=_numbers, default=BATCH, metavar="N,N")
    parser.add_argument(
        "--controls",
        type=_settings,
        default=CONTROLS,
        metavar="A,B",
        help=f"{', '.join(SETTINGS)} (default {','.join(CONTROLS)})",
    )
    parser.add_argument(
        "--history", type=_numbers, default=HISTORY, metavar="N,N", help="tokens before step 0"
    )
    parser.add_argument(
        "--variants",
        type=_variants,
        metavar="A,B",
        help=f"{', '.join(VARIANTS)} (default all; quick without {PARALLEL} and {MIXTURE})",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="interpreter of an environment that has vLLM for CPUs: measure against its sampler",
    )
    parser.add_argument(
        "--samplers",
        type=_numbers,
        default=(),
        metavar="N,N",
        help="also so many samplers at a time, on as many cores",
    )
    parser.add_argument("--runs", type=int, metavar="N", help=f"default {RUNS}, quick {QUICK_RUNS}")
    parser.add_argument("--quick", action="store_true", help="the same cases, fewer runs: a minute")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    torch.set_num_threads(1)
    threads.set_threads(1)
    keep_freed_memory()
    report = Report(
        machine=describe_machine(),
        versions=installed_versions(),
        command=shlex.join(["lexshard", *sys.argv[1:]]),
        seed=arguments.seed,
    )
    try:
        wrong = measure(report, arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"lexshard bench sampler: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        report.write(arguments.json)
        print(f"written: {arguments.json}")
    if wrong:
        print(f"lexshard bench sampler: {wrong} tokens are wrong", file=sys.stderr)
    return 1 if wrong else 0


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on every side; returns how many of our tokens were not the plain draw's."""
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    variants = arguments.variants or (QUICK_VARIANTS if arguments.quick else VARIANTS)
    sizes = (None,) if arguments.model is not None else arguments.vocabulary
    groups = [
        (SETTINGS[name], batch, history)
        for name in arguments.controls
        for batch in arguments.batch
        for history in arguments.history
    ]
    cells: list[Cell] = []
    with (
        pinned_to_cores(1) as cores,
        peer(arguments.vllm_python, cores) as vllm,
        tqdm(total=len(sizes) * len(groups), unit="case", disable=None) as bar,
    ):
        report.machine["pinned_to_cores"] = list(cores)
        if vllm is not None:
            report.versions.update(vllm.versions)
        for size in sizes:
            pool = load_pool(arguments, size)
            tqdm.write(pool.describe())
            by_frequency = np.argsort(-pool.frequency, kind="stable").astype(np.int32)
            for setting, batch, history in groups:
                bar.set_description_str(f"V={pool.vocabulary_size} B={batch} {setting.name}")
                steps = (runs + 1) * steps_per_run(batch) + 1
                scene = Scene(pool, setting, batch, history, steps, arguments.seed)
                cell = measure_cell(scene, variants, vllm, by_frequency, runs)
                cell.compare_tokens(COMPARED)
                cell.record(report)
                cells.append(cell)
                bar.update()
    print(f"\n{table(cells)}\n")
    print_summary(cells, arguments)
    if arguments.samplers:
        shortest = [each for each in groups if each[2] == arguments.history[0]]
        print(f"\n{measure_scaling(report, arguments, shortest, runs, load_pool)}")
    return sum(cell.compared - cell.equal for cell in cells)


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


def measure_cell(
    scene: Scene,
    variants: Sequence[str],
    vllm: VllmProcess | None,
    by_frequency: npt.NDArray[np.int32],
    runs: int,
) -> Cell:
    """One case: the sides that can decide it take turns."""
    setting = scene.setting
    sides: list[Side] = [] if vllm is None else [VllmSide(vllm, scene)]
    cell = Cell(
        scene,
        case={
            "logits": scene.pool.name,
            "V": scene.vocabulary_size,
            "controls": setting.name,
            "batch": scene.batch,
            "history": scene.history,
            "steps per run": steps_per_run(scene.batch),
        },
    )
    for name in variants:
        if name == NAIVE:
            sides.append(TorchSide(scene))
        elif name == PARALLEL and scene.batch > 1:
            sides.append(TorchSide(scene, split=True))
        elif name == OFFLOADED:
            sides.append(DenseSide(OFFLOADED, scene))
        elif name == WITH_MAXIMA:
            sides.append(DenseSide(WITH_MAXIMA, scene, maxima=False))
        elif name == HOT:
            hot = fitted_hot_vocabulary(scene, by_frequency)
            cell.hot_size = hot.size
            sides.append(DenseSide(HOT, scene, hot=hot))
        elif name == CANDIDATES:
            sides.append(CandidateSide(CANDIDATES, scene))
        elif name == COLD:
            sides.append(CandidateSide(COLD, scene, cold=True))
        elif name == MIXTURE and not setting.greedy:
            sides.append(MixtureSide(scene, mixture_hot_ids(scene, by_frequency)))
    if CANDIDATES in variants or COLD in variants:
        cell.candidates = candidates_per_row(scene)
    cell.take_turns(sides, runs)
    return cell


def print_summary(cells: Sequence[Cell], arguments: argparse.Namespace) -> None:
    """What the figures mean, what was equal, and what was not measured."""
    for name in dict.fromkeys(name for cell in cells for name in cell.sets):
        found = [(cell, cell.sets[name]) for cell in cells if name in cell.sets]
        rows, same = (sum(getattr(sets, key) for _, sets in found) for key in ("rows", "equal"))
        print(f"{name} and the port keep the same tokens in {same} of {rows} rows")
        for cell, sets in found:
            if sets.equal < sets.rows:
                print(f"  {place(cell)}: {sets}")
    equal, compared = sum(cell.equal for cell in cells), sum(cell.compared for cell in cells)
    print(f"our tokens equal to the plain draw from all adjusted logits: {equal} of {compared}")
    for line in history_lines(cells):
        print(line)
    print(NOTES)
    if arguments.vllm_python is None:
        print("vLLM's sampler: not measured, give --vllm-python PATH. faster: than naive torch.")


def place(cell: Cell) -> str:
    scene = cell.scene
    return f"V={scene.vocabulary_size}, batch {scene.batch}, {scene.setting.name}"


def history_lines(cells: Sequence[Cell]) -> list[str]:
    """What a longer history costs each side, where several lengths were measured."""
    first: dict[tuple[object, ...], Cell] = {}
    lines = []
    for cell in cells:
        key = tuple(value for name, value in cell.case.items() if name != "history")
        shorter = first.setdefault(key, cell)
        if shorter is cell:
            continue
        costs = [
            f"{name} {percentile(times, 50) / percentile(shorter.milliseconds[name], 50):.2f}x"
            for name, times in cell.milliseconds.items()
        ]
        lines.append(
            f"{place(cell)}: a history of {cell.scene.history:,} costs what one of "
            f"{shorter.scene.history:,} does, times: {', '.join(costs)}"
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


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give positive numbers, for example 1,8,32")
    return numbers


def _settings(text: str) -> tuple[str, ...]:
    return _names(text, tuple(SETTINGS))


def _variants(text: str) -> tuple[str, ...]:
    return _names(text, VARIANTS)


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return names
