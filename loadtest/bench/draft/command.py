"""``lexshard bench draft``: how long drafts stand with each draft head, and what looking costs.

The target writes a text after every prompt once, with the noise that drafting in ``coupled`` mode
shares. The draft computes its hidden states over those texts; a guess depends on the true text
before it alone, since nothing behind a wrong guess counts, so every head is counted on the same
positions without drafting again. Heads: all rows; the router with its position-aware budget; the
router with one budget for every step; a static list of the most frequent tokens. The last two look
at as many tokens as the first router does, on average over the whole run.

What is not here: time per token. ``lexshard bench engine --draft`` measures that.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from actors.body.loading import load
from actors.configuration import EngineConfiguration
from actors.drafter.router.build import draftable
from actors.drafter.router.file import FILE_NAME, read_router_file
from actors.drafter.router.texts import WrittenText, draft_positions
from actors.engine.completion import complete_with_seeds
from actors.engine.engine import Engine
from actors.index.build import own_rows
from actors.index.format import describe_weights
from actors.index.hidden import load_tokenizer
from actors.messages import SamplingParameters
from actors.states.noise_key import noise_key
from kernels import pool
from loadtest.bench.draft.case import (
    FIXED,
    FULL,
    ROUTER,
    STATIC,
    DraftHeads,
    DraftLengths,
    record_lengths,
)
from loadtest.bench.draft.cost import record_costs
from loadtest.bench.draft.tasks import read_tasks, sample
from loadtest.bench.machine import describe_machine, installed_versions, pinned_to_cores
from loadtest.bench.record import CaseLabels, Report

PROMPTS, QUICK_PROMPTS = 80, 10
RUNS, QUICK_RUNS = 15, 3  # of the timings
TOKENS = 128
MOST_PROMPT_TOKENS = 1024
SEED = 1_000_003  # of the first prompt, the next one's is one more; none that trained a router
STEPS = 5
TEMPERATURES = (0.0, 0.8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("--model", type=Path, default=Path("models/lexshard-demo"), metavar="DIR")
    parser.add_argument(
        "--draft", type=Path, default=Path("models/lexshard-demo-draft"), metavar="DIR"
    )
    parser.add_argument(
        "--router", type=Path, metavar="FILE", help="default: the one beside the draft"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of spec_bench_question.jsonl, mt_bench_question.jsonl, gsm8k_test.jsonl and "
        "HumanEval.jsonl.gz, as published; any of them",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help=f"of a task: default {PROMPTS}, quick {QUICK_PROMPTS}",
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="after a prompt")
    parser.add_argument(
        "--gamma",
        type=int,
        default=STEPS,
        metavar="N",
        help=f"guesses of a draft (default {STEPS})",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--quick", action="store_true", help="fewer prompts: a minute")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")


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
    engine = Engine(
        EngineConfiguration(
            model=str(arguments.model), threads=arguments.threads, head="dense", device="cpu"
        )
    )
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
    heads = DraftHeads(weight, router, arguments.gamma)
    print(
        f"{path}: {', '.join(map(str, heads.budgets))} clusters in steps 0 to {arguments.gamma - 1}"
    )
    measured: list[dict[str, DraftLengths]] = []
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
    tokens = float(np.mean([each[ROUTER].share for each in measured])) * len(weight)
    record_costs(report, heads.full, heads.routed, tokens, QUICK_RUNS if arguments.quick else RUNS)
    print(f"\n{report.table()}\n")
    print(summary(measured))


def summary(measured: Sequence[Mapping[str, DraftLengths]]) -> str:
    """What the figures come to, every task and temperature counted alike."""
    lines = []
    for name in (ROUTER, FIXED, STATIC):
        ratios = [each[name].mean / each[FULL].mean for each in measured]
        share = np.mean([each[name].share for each in measured])
        beaten = sum(each[ROUTER].mean > each[name].mean for each in measured)
        equal = sum(each[ROUTER].mean == each[name].mean for each in measured)
        words = f"{name}: {np.mean(ratios):.3f} of the full head's accepted guesses (worst "
        words += f"{min(ratios):.3f}) with {100 * share:.1f}% of the vocabulary"
        if name != ROUTER:
            words += f"; the router is above it in {beaten} of {len(measured)} cases"
            words += f", equal in {equal}"
        lines.append(words)
    return "\n".join(lines)
