"""``lexshard bench draft``: how long drafts stand with each draft head, and what looking costs.

The target writes a text after every prompt once, with the noise that drafting by ``same-token``
shares. The draft computes its hidden states over those texts; a guess depends on the true text
before it alone, since nothing behind a wrong guess counts, so every head is counted on the same
positions without drafting again. Heads: all rows; the router with its position-aware budgets, with
the paper's, with one for every step; a static list of the most frequent tokens. All but the first
look at equally many tokens in every case; ``--shares`` compares them at other sizes too.

Then the engine decodes with each head, and with none, taking turns: tokens per second.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.loading import draftable
from lexshard.actors.drafter.router.file import FILE_NAME, read_router_file
from lexshard.actors.drafter.router.texts import WrittenText, draft_positions
from lexshard.actors.engine.completion import complete_with_seeds
from lexshard.actors.engine.engine import Engine
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.hidden import load_tokenizer
from lexshard.actors.messages import SamplingParameters
from lexshard.actors.states.noise_key import noise_key
from lexshard.kernels import pool
from lexshard.loadtest.bench.draft.case import (
    AS_TRAINED,
    FULL,
    PAPER,
    ROUTER,
    STATIC,
    DraftHeads,
    DraftLengths,
    record_lengths,
)
from lexshard.loadtest.bench.draft.cost import record_costs
from lexshard.loadtest.bench.draft.options import (
    PROMPTS,
    QUICK_PROMPTS,
    QUICK_RUNS,
    QUICK_SPEED_RUNS,
    RUNS,
    SPEED_RUNS,
)
from lexshard.loadtest.bench.draft.speed import PLAIN, DraftingEngine, record_speed
from lexshard.loadtest.bench.draft.tasks import read_tasks, sample
from lexshard.loadtest.bench.machine import describe_machine, installed_versions, pinned_to_cores
from lexshard.loadtest.bench.record import CaseLabels, Report

SPEED_PROMPTS, SPEED_PROMPT_TOKENS = 16, 64
MOST_PROMPT_TOKENS = 1024
TEMPERATURES = (0.0, 0.8)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    try:
        with pinned_to_cores(arguments.threads) as cores:
            torch.set_num_threads(arguments.threads)
            pool.set_threads(arguments.threads)
            report = Report(
                machine={**describe_machine(), "pinned_to_cores": list(cores)},
                versions=installed_versions(),
                command=shlex.join(["lexshard", *sys.argv[1:]]),
                seed=arguments.seed,
            )
            measure_into(report, arguments)
    except (ValueError, OSError) as error:
        print(f"lexshard bench draft: {error}", file=sys.stderr)
        return 1
    if arguments.json is not None:
        report.write(arguments.json)
        print(f"written: {arguments.json}")
    return 0


def measure_into(report: Report, arguments: argparse.Namespace) -> None:
    """Every task at every temperature, then what the products of a step cost."""
    draft = load(arguments.draft, device="cpu")
    body = draftable(draft)
    weight = own_rows(draft).weight
    path = arguments.router or arguments.draft / FILE_NAME
    router = read_router_file(path, describe_weights(weight, None))
    configuration = EngineConfiguration(
        model=str(arguments.model), threads=arguments.threads, head="dense", device="cpu"
    )
    engine = Engine(configuration)
    if engine.model.vocabulary_size != draft.vocabulary_size:
        raise ValueError(
            f"{arguments.draft} has {draft.vocabulary_size:,} tokens, {arguments.model} "
            f"{engine.model.vocabulary_size:,}: name the draft of this model"
        )
    count = arguments.prompts or (QUICK_PROMPTS if arguments.quick else PROMPTS)
    most = min(engine.max_model_len, draft.max_positions) - arguments.tokens
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer: the tasks are text")
    tasks = read_tasks(arguments.data, tokenizer, min(most, MOST_PROMPT_TOKENS))
    heads = DraftHeads(weight, router, arguments.gamma, arguments.shares)
    print(
        f"{path}: {', '.join(map(str, heads.budgets))} clusters in steps 0 to {arguments.gamma - 1}"
    )
    measured: list[Mapping[str, Mapping[str, DraftLengths]]] = []
    for task, prompts in tasks.items():
        chosen = sample(prompts, count, arguments.seed)
        for temperature in TEMPERATURES:
            parameters = SamplingParameters(temperature=temperature, max_tokens=arguments.tokens)
            seeds = [arguments.seed + number for number in range(len(chosen))]
            written = complete_with_seeds(engine, chosen, parameters, seeds)
            texts = [
                WrittenText(done.prompt_ids, done.token_ids, temperature, noise_key(seed, 0))
                for done, seed in zip(written, seeds, strict=True)
            ]
            lengths = heads.lengths(draft_positions(body, texts))
            labels: CaseLabels = {"task": task, "temperature": temperature, "prompts": len(chosen)}
            record_lengths(report, labels, lengths)
            measured.append(lengths)
    tokens = len(weight) * float(np.mean([each[AS_TRAINED][ROUTER].share for each in measured]))
    record_costs(report, heads.full, heads.routed, tokens, QUICK_RUNS if arguments.quick else RUNS)
    one_by_one = replace(configuration, max_running=1, prefix_cache=False)
    engines = {
        name: DraftingEngine(one_by_one, arguments.draft, head, arguments.gamma)
        for name, head in {
            FULL: heads.full,
            ROUTER: heads.routed,
            STATIC: heads.static(tokens),
            PLAIN: None,
        }.items()
    }
    every = [ids for prompts in tasks.values() for ids in prompts]
    asked = [ids[-SPEED_PROMPT_TOKENS:] for ids in sample(every, SPEED_PROMPTS, arguments.seed)]
    for temperature in TEMPERATURES:
        parameters = SamplingParameters(temperature=temperature, max_tokens=arguments.tokens)
        runs = QUICK_SPEED_RUNS if arguments.quick else SPEED_RUNS
        record_speed(report, engines, asked, parameters, runs, ROUTER)
    print(f"\n{report.table()}\n")
    print(summary(measured))


def summary(measured: Sequence[Mapping[str, Mapping[str, DraftLengths]]]) -> str:
    """What the figures come to, every task and temperature counted alike."""
    lines = []
    for size in measured[0]:
        cases = [each[size] for each in measured]
        ours = ROUTER if ROUTER in cases[0] else PAPER
        for name in (name for name in cases[0] if name != FULL):
            ratios = [each[name].mean / each[FULL].mean for each in cases]
            share = np.mean([each[name].share for each in cases])
            words = f"{size}: {name}: {np.mean(ratios):.3f} of the full head's accepted guesses "
            words += f"(worst {min(ratios):.3f}) with {100 * share:.1f}% of the vocabulary"
            if name != ours:
                beaten = sum(each[ours].mean > each[name].mean for each in cases)
                equal = sum(each[ours].mean == each[name].mean for each in cases)
                words += f"; {ours} is above it in {beaten} of {len(cases)} cases"
                words += f", equal in {equal}"
            lines.append(words)
    return "\n".join(lines)
