"""``lexshard bench engine``: continuous batches of mixed lengths, without HTTP.

Every engine generates the same tokens: greedy, end of sequence ignored, same checkpoint, dtype,
number of threads and cores, warm. With ``--temperature`` ours is compared with ours, same seeds.
``generate`` takes turns with the engine run by run in one process; vLLM, which needs an environment
of its own, takes turns with it process by process. Throughput counts the tokens the requests asked
for over the time until the last is done, prompts included. Every run has prompts of its own, the
same for all engines.

``--shape large-vocabulary`` measures a random checkpoint of these dimensions instead (see
``random_model``): our certified head takes turns with our dense one, then with vLLM.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from lexshard.actors.configuration import NGRAM
from lexshard.loadtest.bench.bandwidth import read_bandwidth
from lexshard.loadtest.bench.engine.options import (
    PAIRS,
    QUICK_PAIRS,
    QUICK_REPEATS,
    QUICK_RUNS,
    REPEATS,
    REQUESTS,
    RUNS,
    SHAPE_REQUESTS,
)
from lexshard.loadtest.bench.engine.random_model import write_random_model
from lexshard.loadtest.bench.engine.recording import add_agreement, add_measures
from lexshard.loadtest.bench.engine.runner import EngineRunner
from lexshard.loadtest.bench.machine import describe_machine, installed_versions, pinned_to_cores
from lexshard.loadtest.bench.peers.transformers_generate import GenerateRunner
from lexshard.loadtest.bench.process_pairs import (
    Task,
    Worker,
    alternate,
    lexshard_worker,
    vllm_worker,
)
from lexshard.loadtest.bench.record import CaseLabels, Report
from lexshard.loadtest.bench.runs import Runner, run_interleaved
from lexshard.loadtest.bench.workload import Job, mixed_jobs


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    disable_progress_bar()
    try:
        refuse_other_laws(arguments)
        wanted = arguments.threads + (arguments.against == "samplers")
        with pinned_to_cores(wanted) as cores, checkpoint(arguments) as model:
            report = measure(arguments, model, cores)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"lexshard bench engine: {error}", file=sys.stderr)
        return 1
    print(f"\n{report.table()}\n")
    print("TTFT and TPOT: median over the requests of a run; p10 and p90: over the runs.")
    print("we are: median of the ratios of neighbouring runs, above 1 where lexshard is better.")
    if arguments.shape is None:
        print("generate: one left-padded batch that runs to its longest output; only wanted")
        print("tokens count.")
    if arguments.vllm_python is None:
        print("vLLM: not measured, give --vllm-python PATH.")
    if arguments.json is not None:
        report.write(arguments.json)
        print(f"written: {arguments.json}")
    return 0


def opponent(arguments: argparse.Namespace) -> str:
    """What ours takes turns with in one process."""
    default = "generate" if arguments.shape is None else "dense"
    against: str = arguments.against or (default if arguments.draft is None else "plain")
    return against


def refuse_other_laws(arguments: argparse.Namespace) -> None:
    """Raises ValueError where engines would draw with noise of their own, or cannot draw."""
    if not 0 <= arguments.temperature < float("inf"):
        raise ValueError(f"--temperature {arguments.temperature}: give 0 or more")
    if arguments.top_k < 0 or not 0 < arguments.top_p <= 1:
        raise ValueError("--top-k is 0 (all) or more, --top-p above 0 and at most 1")
    if arguments.temperature == 0 and (arguments.top_k > 0 or arguments.top_p < 1):
        raise ValueError("--top-k and --top-p change nothing at temperature 0: give --temperature")
    others = opponent(arguments) == "generate" or arguments.vllm_python is not None
    if arguments.temperature > 0 and others:
        raise ValueError(
            "only our engines draw the same tokens above temperature 0: give --against plain, "
            "dense or samplers, and no --vllm-python"
        )


@contextmanager
def checkpoint(arguments: argparse.Namespace) -> Iterator[str]:
    """The folder to measure; completes the options that depend on what it is.

    A random checkpoint is written to a temporary folder and deleted afterwards.
    """
    if arguments.shape is None:
        # With what a machine for GPU benchmarks alone may lack.
        from lexshard.cluster.models.folders import model_folder
        from lexshard.cluster.models.progress import tell
        from lexshard.cluster.models.refusal import LoadingOptions

        arguments.requests = arguments.requests or REQUESTS
        arguments.dtype = arguments.dtype or "float32"
        loading = LoadingOptions(arguments.dtype)
        if arguments.draft not in (None, NGRAM):
            arguments.draft = model_folder(arguments.draft, tell, loading=loading)
        yield model_folder(arguments.model, tell, loading=loading)
        return
    arguments.requests = arguments.requests or SHAPE_REQUESTS
    arguments.dtype = arguments.dtype or "bfloat16"
    arguments.model = f"random, {arguments.shape}"
    with TemporaryDirectory() as folder:
        write_random_model(Path(folder), seed=arguments.seed)
        yield folder


def measure(arguments: argparse.Namespace, model: str, cores: Sequence[int]) -> Report:
    """Run every case on every engine that was given."""
    report = Report(
        machine={**describe_machine(), "pinned_to_cores": list(cores)},
        versions=installed_versions(),
        command=shlex.join(["lexshard", *sys.argv[1:]]),
        seed=arguments.seed,
    )
    vllm = (
        vllm_worker(arguments.vllm_python, cores, arguments.threads)
        if arguments.vllm_python is not None
        else None
    )
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    jobs_of = partial(mixed_jobs, tokenizer)
    settings = (model, arguments.dtype, arguments.threads, arguments.body)
    ours_as = partial(
        EngineRunner,
        *settings,
        tiers=arguments.tiers,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
    )
    ours = ours_as(arguments.head, draft=arguments.draft, draft_head=arguments.draft_head)
    other: Runner
    against = opponent(arguments)
    if against == "generate":
        other = GenerateRunner(model, arguments.dtype, arguments.threads, arguments.draft)
    elif against == "plain":
        other = ours_as(arguments.head, name="lexshard, no draft")
    elif against == "samplers":
        other = ours_as(arguments.head, name="lexshard, a sampler beside", samplers=1)
    else:
        other = ours_as("dense", name="lexshard, dense head")
    parameters = ours.information.parameters
    print(
        f"{arguments.model}: {parameters / 1e6:.1f}M parameters, "
        f"{arguments.dtype}, {ours.information.body} body, {ours.information.head} head, "
        f"{arguments.threads} thread(s) on core(s) {', '.join(map(str, cores))}"
    )
    if arguments.shape is not None:
        print_roofline(report, parameters, arguments)
    for count in arguments.requests:
        measure_in_turns(report, arguments, ours, other, partial(jobs_of, count))
    if vllm is not None:
        task = Task(
            model=model,
            dtype=arguments.dtype,
            threads=arguments.threads,
            body=arguments.body,
            max_model_len=ours.information.max_model_len,
            cases=(),
            repeats=QUICK_REPEATS if arguments.quick else REPEATS,
            head=arguments.head,
            tiers=arguments.tiers,
            draft=arguments.draft,
            draft_head=arguments.draft_head,
            draft_tokens=arguments.draft_tokens,
        )
        measure_beside_vllm(report, arguments, task, vllm, other, jobs_of)
    return report


def print_roofline(report: Report, parameters: int, arguments: argparse.Namespace) -> None:
    """What one token costs at least if every weight is read once, as stored in ``dtype``."""
    size = parameters * (2 if arguments.dtype == "bfloat16" else 4)
    bandwidth = read_bandwidth(arguments.threads)
    report.machine["read_bytes_per_second"] = bandwidth
    print(
        f"roofline of one token: {size / 1e6:.0f} MB of {arguments.dtype} weights at "
        f"{bandwidth / 1e9:.1f} GB/s take {1e3 * size / bandwidth:.1f} ms; a certified head reads "
        "fewer"
    )


def measure_in_turns(
    report: Report,
    arguments: argparse.Namespace,
    ours: Runner,
    other: Runner,
    jobs_of: Callable[[int], tuple[Job, ...]],
) -> None:
    """One case of the engine and of another one, taking turns run by run in this process. Every run
    has requests of its own: a single text says little of how often guesses stand."""
    count = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    workloads = [jobs_of(arguments.seed + index) for index in range(count)]
    runs = run_interleaved([ours, other], workloads)
    labels = _labels(arguments, len(workloads[0]), "one process")
    add_measures(report, labels, {name: [(run,) for run in each] for name, each in runs.items()})
    pairs = zip(workloads, runs[ours.name], runs[other.name], strict=True)
    add_agreement(report, labels, pairs, other, against=other.name)


def measure_beside_vllm(
    report: Report,
    arguments: argparse.Namespace,
    task: Task,
    vllm: Worker,
    reference: Runner,
    jobs_of: Callable[[int, int], tuple[Job, ...]],
) -> None:
    """Every case of the engine and of vLLM, taking turns process by process, of which every pair
    has requests of its own."""
    pairs = arguments.runs or (QUICK_PAIRS if arguments.quick else PAIRS)
    tasks = [
        replace(
            task,
            cases=tuple(jobs_of(count, arguments.seed + index) for count in arguments.requests),
        )
        for index in range(pairs)
    ]
    ours, theirs = [], []
    for mine, other in alternate([lexshard_worker(), vllm], tasks):
        ours.append(mine)
        theirs.append(other)
        print(f"process pair {len(ours)} of {pairs} done", file=sys.stderr)
    report.versions.update(theirs[0].versions)
    for index, count in enumerate(arguments.requests):
        labels = _labels(arguments, count, "process pairs")
        runs = {
            "lexshard": [each.cases[index] for each in ours],
            vllm.name: [each.cases[index] for each in theirs],
        }
        add_measures(report, labels, runs)
        workloads = [each.cases[index] for each in tasks for _ in range(task.repeats)]
        together = zip(workloads, chain(*runs["lexshard"]), chain(*runs[vllm.name]), strict=True)
        add_agreement(report, labels, together, reference, against=vllm.name)


def _labels(arguments: argparse.Namespace, requests: int, setting: str) -> CaseLabels:
    return {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "body": arguments.body,
        "head": arguments.head,
        "tiers": ",".join(arguments.tiers),
        "draft": arguments.draft or "none",
        "draft head": arguments.draft_head,
        "temperature": arguments.temperature,
        "top-k": arguments.top_k,
        "top-p": arguments.top_p,
        "setting": setting,
        "requests": requests,
    }
