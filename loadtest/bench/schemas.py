"""``lexshard bench schemas``: real schemas, held token by token, and the speed of such outputs.

Every instance in the files goes token by token through the masks of its schema's grammar, compiled
as a server compiles it. Then an engine generates under some of these schemas, beside free text of
the same lengths by the same engine, by turns. What compiling takes is in the times.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.grammar.grammars import grammar_tokenizer
from lexshard.actors.messages import SamplingParameters
from lexshard.loadtest.bench.engine_runs import THROUGHPUT, TIME_TO_FIRST_TOKEN, EngineRun
from lexshard.loadtest.bench.frame import in_turns, run_bench
from lexshard.loadtest.bench.machine import pinned_to_cores
from lexshard.loadtest.bench.options.schemas import QUICK_SCHEMAS, SCHEMAS
from lexshard.loadtest.bench.peers.own_engine import EngineRunner
from lexshard.loadtest.bench.record import Report
from lexshard.loadtest.bench.synthetic.jobs import Job, mixed_jobs
from lexshard.loadtest.bench.synthetic.schema_files import Held, Holder, hold, read_files


def run(arguments: argparse.Namespace) -> int:
    """Hold and measure; returns the exit status."""
    return run_bench("schemas", arguments, measure, checked="instances")


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """The number of instances that came out otherwise than they must."""
    with pinned_to_cores(arguments.threads) as cores:
        report.machine["pinned_to_cores"] = list(cores)
        model = str(arguments.model)
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        configuration = EngineConfiguration(
            model, dtype=arguments.dtype, threads=arguments.threads, prefix_cache=False
        )
        sampling = SamplingParameters(temperature=arguments.temperature)
        engine = EngineRunner(configuration, sampling)
        known = engine.information
        tokens = grammar_tokenizer(model, known.vocabulary_size, known.eos_token_ids)
        found = held(arguments, Holder(tokenizer, tokens, known.vocabulary_size))
        wrong = judged(report, found, arguments.record)
        for count in () if arguments.held_only else arguments.requests:
            workloads = [
                under(mixed_jobs(tokenizer, count, seed), list(found.grammars.values()), seed)
                for seed in range(arguments.seed, arguments.seed + arguments.runs)
            ]
            in_pairs(report, arguments, engine, workloads)
    if not arguments.held_only:
        share = engine.forced_share()
        report.notes.append(f"{share:.0%} of all tokens, the free ones too, were forced.")
    return wrong


def held(arguments: argparse.Namespace, holder: Holder) -> Held:
    """What came of all files; tells how far it is."""
    wanted = arguments.schemas or (QUICK_SCHEMAS if arguments.quick else SCHEMAS)
    files = read_files(arguments.folder, wanted, arguments.seed)
    found = Held()
    for number, _ in enumerate(hold(files, holder, found), 1):
        if sys.stderr.isatty() or number % 500 == 0:
            end = "\r" if sys.stderr.isatty() else "\n"
            print(f"{number} of {len(files)} schemas", end=end, file=sys.stderr)
    return found


def judged(report: Report, found: Held, record: Path | None) -> int:
    """Tells what was found, beside llguidance's ``record`` where there is one; the number of
    instances that are wrong: invalid ones that passed, and valid ones that did not pass though they
    do by the record."""
    outcomes = Counter(found.outcomes.values())
    lines = [
        f"{len(found.outcomes)} schemas: {outcomes['held']} held, of {outcomes['left']} a part was "
        f"left to the model, {outcomes['refused']} refused; {found.tokens} masks",
        f"valid instances: {found.right} passed, in {len(found.rejected)} files some did not",
        f"invalid instances: {found.wrong} stopped, {found.left} passed where a note tells what is "
        f"not held, in {len(found.passed)} files some passed and no note says why",
    ]
    amiss = dict(found.passed)
    if record is not None:
        told = json.loads(record.read_text(encoding="utf-8"))
        theirs = [name for name in found.outcomes if told.get(f"{name}.json") == {}]
        amiss |= {name: found.rejected[name] for name in theirs if name in found.rejected}
        ours = Counter(found.outcomes[name] for name in theirs)
        lines.append(
            f"{len(theirs)} of these schemas llguidance holds by its record: {ours['held']} are "
            f"held, {ours['left']} in part, {ours['refused']} refused"
        )
        refused = [name for name in theirs if found.outcomes[name] == "refused"]
        lines += [f"  {name}: {found.reasons[name]}" for name in refused]
    lines += [f"wrong: {name}: {text[:200]}" for name, text in amiss.items()]
    report.notes += lines
    return len(amiss)


def under(jobs: Sequence[Job], grammars: Sequence[str], seed: int) -> tuple[Job, ...]:
    """The jobs, each under another of the grammars."""
    chosen = random.Random(seed).choices(grammars, k=len(jobs))
    return tuple(replace(job, grammar=each) for job, each in zip(jobs, chosen, strict=True))


def in_pairs(
    report: Report,
    arguments: argparse.Namespace,
    engine: EngineRunner,
    workloads: Sequence[tuple[Job, ...]],
) -> None:
    """One number of requests: outputs under schemas beside free ones of their lengths."""
    lengths = [list(map(len, engine.run(jobs, seed=0).token_ids)) for jobs in workloads]

    def constrained(turn: int) -> EngineRun:
        # White space behind a grammar changes nothing but its name: it is compiled again.
        again = " " * (turn + 2)
        jobs = workloads[max(turn, 0)]
        return engine.run([replace(job, grammar=f"{job.grammar}{again}") for job in jobs], seed=0)

    def free(turn: int) -> EngineRun:
        pairs = zip(workloads[max(turn, 0)], lengths[max(turn, 0)], strict=True)
        return engine.run([Job(job.prompt_ids, length) for job, length in pairs], seed=0)

    runs = in_turns({"lexshard": constrained, "lexshard, free text": free}, arguments.runs)
    labels = {
        "model": str(arguments.model),
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "temperature": arguments.temperature,
        "requests": len(workloads[0]),
    }
    for measured, value in (
        (THROUGHPUT, lambda run: run.throughput),
        (TIME_TO_FIRST_TOKEN, lambda run: run.time_to_first_token),
    ):
        raw = {name: list(map(value, each)) for name, each in runs.items()}
        report.add(labels, measured, raw, ours="lexshard")
