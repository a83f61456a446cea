"""``lexshard bench engine``: continuous batches of mixed lengths, without HTTP.

Every engine generates the same tokens from prompts that are others in every run. ``generate``, or
another engine of ours, takes turns with ours run by run in one process; vLLM, which needs an
environment of its own, process by process. ``--shape`` measures a random checkpoint
(``synthetic.random_model``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from lexshard.actors.configuration import NGRAM
from lexshard.actors.messages import SamplingParameters
from lexshard.loadtest.bench.engine_runs import (
    EngineRun,
    Runner,
    add_agreement,
    add_measures,
    check_lengths,
)
from lexshard.loadtest.bench.frame import in_turns, run_bench
from lexshard.loadtest.bench.machine import pinned_to_cores, read_bandwidth
from lexshard.loadtest.bench.options.engine import (
    QUICK_REPEATS,
    REPEATS,
    REQUESTS,
    SHAPE_REQUESTS,
    opponent,
    refuse_other_laws,
)
from lexshard.loadtest.bench.peers.beside_vllm import (
    Worker,
    alternate,
    lexshard_worker,
    vllm_worker,
)
from lexshard.loadtest.bench.peers.gguf import write_gguf
from lexshard.loadtest.bench.peers.llama_cpp import (
    PROMPT_TOKENS,
    LlamaBench,
    Speeds,
    add_speeds,
    own_speeds,
)
from lexshard.loadtest.bench.peers.own_engine import OPTIONS, EngineRunner, configuration_of
from lexshard.loadtest.bench.peers.transformers_generate import GenerateRunner
from lexshard.loadtest.bench.record import CaseLabels, Report
from lexshard.loadtest.bench.synthetic.jobs import Job, mixed_jobs, story_tokens
from lexshard.loadtest.bench.synthetic.random_model import Family, write_random_model
from lexshard.loadtest.bench.synthetic.schemas import grammar_of

TASK = (*OPTIONS, "draft_tokens")
# Ours beside ours, in one process: how the other is called, and in what it differs.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("lexshard, no draft", {}),
    "samplers": ("lexshard, a sampler beside", {"samplers": 1}),
    "dense": ("lexshard, dense head", {"head": "dense"}),
    "free": ("lexshard, free text", {}),
}
NOTES = """\
TTFT and TPOT: median over the requests of a run. Decoding: from when all requests have begun until
the first ends, where there is such a time. In brackets: median of the ratios of neighbouring runs,
above 1 where lexshard is better. generate: one left-padded batch that runs to its longest output;
only wanted tokens count."""

JobsOf = Callable[[int, int], tuple[Job, ...]]  # of a number of requests and a seed


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    disable_progress_bar()
    return run_bench("engine", arguments, measure)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case on every engine that was given; nothing of it can be wrong."""
    refuse_other_laws(arguments)
    wanted = arguments.threads + (arguments.against == "samplers")
    with pinned_to_cores(wanted) as cores, checkpoint(arguments) as model:
        report.machine["pinned_to_cores"] = list(cores)
        measure_on_cores(report, arguments, model, cores)
    report.notes.append(NOTES)
    if arguments.vllm_python is None:
        report.notes.append("vLLM: not measured, give --vllm-python PATH.")
    if arguments.llama_bench is None:
        report.notes.append("llama.cpp: not measured, give --llama-bench DIR.")
    return 0


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
        family: Family = "gemma3" if arguments.shape == "gemma3" else "llama"
        write_random_model(Path(folder), seed=arguments.seed, family=family)
        yield folder


def measure_on_cores(
    report: Report, arguments: argparse.Namespace, model: str, cores: Sequence[int]
) -> None:
    """Every case of ours beside another engine in this process, then beside vLLM's processes."""
    vllm = None
    if arguments.vllm_python is not None:
        vllm = vllm_worker(arguments.vllm_python, cores, arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    jobs_of = partial(mixed_jobs, tokenizer)
    configuration = configuration_of(model, vars(arguments))
    sampling = SamplingParameters(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    grammar = None if arguments.schema is None else grammar_of(arguments.schema)
    ours = EngineRunner(configuration, sampling)
    other: Runner
    against = opponent(arguments)
    if against == "generate":
        other = GenerateRunner(model, arguments.dtype, arguments.threads, arguments.draft)
    else:
        name, changes = OTHERS[against]
        plain = replace(configuration, **changes)
        if against != "free":
            plain = replace(plain, draft=None, draft_head="auto")
        other = EngineRunner(plain, sampling, name)
    information = ours.information
    print(
        f"{arguments.model}: {information.parameters / 1e6:.1f}M parameters, "
        f"{arguments.dtype}, {information.body} body, {information.head} head, "
        f"{arguments.threads} thread(s) on core(s) {', '.join(map(str, cores))}"
    )
    if arguments.shape is not None:
        print_roofline(report, information.parameters, arguments)
    for count in arguments.requests:
        measure_in_turns(report, arguments, [ours, other], partial(jobs_of, count), grammar)
    if grammar is not None:
        report.notes.append(f"{ours.forced_share():.0%} of the tokens under the schema are forced.")
    if vllm is not None:
        task = {
            "model": model,
            "max_model_len": information.max_model_len,
            "repeats": QUICK_REPEATS if arguments.quick else REPEATS,
            **{name: getattr(arguments, name) for name in TASK},
        }
        measure_beside_vllm(report, arguments, task, vllm, jobs_of)
    if arguments.llama_bench is not None:
        measure_beside_llama(report, arguments, model, ours)


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
    runners: Sequence[Runner],
    jobs_of: Callable[[int], tuple[Job, ...]],
    grammar: str | None,
) -> None:
    """One case of the engine and of another one, taking turns run by run in this process. Every run
    has requests of its own: a single text says little of how often guesses stand. Ours are under
    ``grammar``."""
    workloads = [jobs_of(arguments.seed + index) for index in range(arguments.runs)]

    def checked(runner: Runner, turn: int) -> EngineRun:
        jobs = workloads[max(turn, 0)]
        if runner is runners[0] and grammar is not None:
            jobs = tuple(replace(job, grammar=grammar) for job in jobs)
        made = runner.run(jobs)
        check_lengths(runner.name, made, jobs)
        return made

    runs = in_turns({each.name: partial(checked, each) for each in runners}, arguments.runs)
    labels = labels_of(arguments, len(workloads[0]), "one process")
    add_measures(report, labels, {name: [(run,) for run in each] for name, each in runs.items()})
    if arguments.schema is not None:  # they are to say different things
        return
    ours, other = runners
    pairs = zip(workloads, runs[ours.name], runs[other.name], strict=True)
    add_agreement(report, labels, pairs, other.name)


def measure_beside_vllm(
    report: Report,
    arguments: argparse.Namespace,
    task: Mapping[str, object],
    vllm: Worker,
    jobs_of: JobsOf,
) -> None:
    """Every case of the engine and of vLLM, taking turns process by process, of which every pair
    has requests of its own. Raises RuntimeError where an engine makes other than it was asked."""
    workloads = [
        [jobs_of(count, arguments.seed + index) for count in arguments.requests]
        for index in range(arguments.runs)
    ]
    tasks = [{**task, "cases": [list(map(asdict, each)) for each in cases]} for cases in workloads]
    workers = [lexshard_worker(), vllm]
    found: dict[str, list[list[list[EngineRun]]]] = {each.name: [] for each in workers}
    for cases, told in zip(workloads, alternate(workers, tasks), strict=True):
        for worker, said in zip(workers, told, strict=True):
            report.versions.update(said["versions"])
            runs = [[EngineRun.from_json(run) for run in case] for case in said["cases"]]
            for jobs, several in zip(cases, runs, strict=True):
                for run in several:
                    check_lengths(worker.name, run, jobs)
            found[worker.name].append(runs)
        print(f"process pair {len(found[vllm.name])} of {arguments.runs} done", file=sys.stderr)
    for index, count in enumerate(arguments.requests):
        labels = labels_of(arguments, count, "process pairs")
        of_case = {name: [runs[index] for runs in each] for name, each in found.items()}
        add_measures(report, labels, of_case)
        together = [
            (cases[index], mine, theirs)
            for cases, own, others in zip(workloads, *of_case.values(), strict=True)
            for mine, theirs in zip(own, others, strict=True)
        ]
        add_agreement(report, labels, together, vllm.name)


def measure_beside_llama(
    report: Report, arguments: argparse.Namespace, model: str, ours: EngineRunner
) -> None:
    """Every case of ours and of llama.cpp's own bench, by turns. Raises what `LlamaBench` does."""
    story = story_tokens(AutoTokenizer.from_pretrained(model, local_files_only=True))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(Path(model), file)
        llama = LlamaBench(arguments.llama_bench, file, arguments.threads)
        for count in arguments.requests:

            def own(turn: int, count: int = count) -> Speeds:
                places = [97 * (turn + 2) + PROMPT_TOKENS * index for index in range(count)]
                starts = [at % (len(story) - PROMPT_TOKENS) for at in places]
                return own_speeds(ours, [tuple(story[at : at + PROMPT_TOKENS]) for at in starts])

            sides = {ours.name: own, llama.name: lambda _, count=count: llama.measure(count)}
            found = in_turns(sides, arguments.runs)
            add_speeds(report, labels_of(arguments, count, "beside llama.cpp"), found)
    report.notes.append("llama.cpp computes logits and chooses no token; ours decides every one.")


def labels_of(arguments: argparse.Namespace, requests: int, setting: str) -> CaseLabels:
    named = ("model", "dtype", "threads", "head")
    return {
        **{name: getattr(arguments, name) for name in named},
        "draft": arguments.draft or "none",
        "draft head": arguments.draft_head,
        "temperature": arguments.temperature,
        "top-k": arguments.top_k,
        "top-p": arguments.top_p,
        "schema": arguments.schema or "none",
        "setting": setting,
        "requests": requests,
    }
