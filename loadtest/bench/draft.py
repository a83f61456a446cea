"""``lexshard bench draft``: how long drafts stand with each draft head.

The target writes a text after every prompt once, with the noise that drafting shares. A guess
depends on the true text before it alone, since nothing behind a wrong guess counts, so every head
is counted on the same positions without drafting again. All heads but the one with all rows look at
equally many tokens. How fast an engine is with each is what ``bench engine --draft-head`` measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import numpy as np

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.router.file import FILE_NAME, read_router_file
from lexshard.actors.engine.engine import Engine
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.hidden import load_tokenizer
from lexshard.loadtest.bench.frame import run_bench
from lexshard.loadtest.bench.options.draft import PROMPTS, QUICK_PROMPTS
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.tasks import read_tasks, sample
from lexshard.loadtest.draft_heads.compared import (
    FULL,
    PAPER,
    ROUTER,
    DraftHeads,
    DraftLengths,
)
from lexshard.loadtest.draft_heads.texts import (
    draft_positions,
    draftable,
    written_texts,
)

MOST_PROMPT_TOKENS = 1024
TEMPERATURES = (0.0, 0.8)

ACCEPTED = Measure("accepted guesses", "per draft", higher_is_better=True)
LOOKED = Measure("vocabulary looked at", "%", higher_is_better=False)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_bench("draft", arguments, measure, threads=arguments.threads)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every task at every temperature; nothing can be wrong."""
    draft = load(arguments.draft, device="cpu")
    weight = own_rows(draft).weight
    path = arguments.draft / FILE_NAME
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
    most = min(engine.max_model_len, draft.max_positions) - arguments.tokens
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer: the tasks are text")
    tasks = read_tasks(arguments.data, tokenizer, min(most, MOST_PROMPT_TOKENS))
    heads = DraftHeads(weight, router, arguments.gamma, arguments.shares)
    steps = f"in steps 0 to {arguments.gamma - 1}"
    print(f"{path}: {', '.join(map(str, heads.budgets))} clusters {steps}")
    count = arguments.prompts or (QUICK_PROMPTS if arguments.quick else PROMPTS)
    measured: list[Mapping[str, Mapping[str, DraftLengths]]] = []
    for task, prompts in tasks.items():
        chosen = sample(prompts, count, arguments.seed)
        seeds = [arguments.seed + number for number in range(len(chosen))]
        for temperature in TEMPERATURES:
            texts = written_texts(engine, chosen, temperature, seeds, arguments.tokens)
            lengths = heads.lengths(draft_positions(draftable(draft), texts))
            labels: CaseLabels = {"task": task, "temperature": temperature, "prompts": len(chosen)}
            record_lengths(report, labels, lengths)
            measured.append(lengths)
    report.notes += summary(measured)
    return 0


def summary(measured: Sequence[Mapping[str, Mapping[str, DraftLengths]]]) -> list[str]:
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
    return lines


def record_lengths(
    report: Report, labels: CaseLabels, compared: Mapping[str, Mapping[str, DraftLengths]]
) -> None:
    """One figure of every head: drafts of different heads begin at different places."""
    for size, lengths in compared.items():
        case: CaseLabels = {**labels, "size": size}
        ours = ROUTER if ROUTER in lengths else PAPER
        means = {name: [each.mean] for name, each in lengths.items()}
        report.add(case, ACCEPTED, means, ours=ours)
        report.add(case, LOOKED, {name: [100 * each.share] for name, each in lengths.items()})
