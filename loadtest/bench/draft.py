"""``lexshard bench draft``: how long drafts stand with each draft head, and how fast the engine is.

The target writes a text after every prompt once, with the noise that drafting shares. A guess
depends on the true text before it alone, since nothing behind a wrong guess counts, so every head
is counted on the same positions without drafting again. All heads but the one with all rows look at
equally many tokens. The engine then takes one request at a time and makes always the same number of
guesses: how far to guess would hide what a head costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.model import ModelDrafter
from lexshard.actors.drafter.router.file import FILE_NAME, read_router_file
from lexshard.actors.engine.engine import Engine
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.hidden import load_tokenizer
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import SamplingParameters
from lexshard.kernels.draft import DraftHead
from lexshard.loadtest.bench.frame import in_turns, run_bench
from lexshard.loadtest.bench.options.draft import PROMPTS, QUICK_PROMPTS
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.tasks import read_tasks, sample
from lexshard.loadtest.draft_heads.compared import (
    AS_TRAINED,
    FULL,
    PAPER,
    ROUTER,
    STATIC,
    DraftHeads,
    DraftLengths,
)
from lexshard.loadtest.draft_heads.texts import (
    complete_with_seeds,
    draft_positions,
    draftable,
    written_texts,
)

SPEED_PROMPTS, SPEED_PROMPT_TOKENS = 16, 64
MOST_PROMPT_TOKENS = 1024
TEMPERATURES = (0.0, 0.8)
PLAIN = "no drafts"

ACCEPTED = Measure("accepted guesses", "per draft", higher_is_better=True)
LOOKED = Measure("vocabulary looked at", "%", higher_is_better=False)
SPEED = Measure("speed", "tokens/s", higher_is_better=True)
DRAFTING = Measure("drafting", "us per guess", higher_is_better=False)
SHORTLIST = Measure("shortlist", "rows per guess", higher_is_better=False)

Prompt = tuple[int, ...]


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_bench("draft", arguments, measure, threads=arguments.threads)


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every task at every temperature, then the engine with each head; nothing can be wrong."""
    draft = load(arguments.draft, device="cpu")
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
    tokens = len(weight) * float(np.mean([each[AS_TRAINED][ROUTER].share for each in measured]))
    one_by_one = replace(configuration, max_running=1, prefix_cache=False)
    compared = {
        FULL: heads.full,
        ROUTER: heads.routed,
        STATIC: heads.static(tokens),
        PLAIN: None,
    }
    engines = {
        name: DraftingEngine(one_by_one, arguments.draft, head, arguments.gamma)
        for name, head in compared.items()
    }
    every = [ids for prompts in tasks.values() for ids in prompts]
    asked = [ids[-SPEED_PROMPT_TOKENS:] for ids in sample(every, SPEED_PROMPTS, arguments.seed)]
    for temperature in TEMPERATURES:
        parameters = SamplingParameters(temperature=temperature, max_tokens=arguments.tokens)
        record_speed(report, engines, asked, parameters, arguments.runs, ROUTER)
    report.notes += summary(measured)
    return 0


def record_speed(
    report: Report,
    engines: Mapping[str, DraftingEngine],
    prompts: Sequence[Prompt],
    parameters: SamplingParameters,
    runs: int,
    ours: str,
) -> None:
    """``runs`` turns of every engine over the prompts, after one that warms up."""
    figures = in_turns(
        {name: partial(each.run, prompts, parameters) for name, each in engines.items()}, runs
    )
    labels: CaseLabels = {
        "task": "one request at a time",
        "temperature": parameters.temperature,
        "prompts": len(prompts),
    }
    for place, measure in enumerate((SPEED, DRAFTING, SHORTLIST)):
        of = {
            name: [run[place] for run in taken]
            for name, taken in figures.items()
            if name != PLAIN or measure is SPEED
        }
        report.add(labels, measure, of, ours=ours)


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


class DraftingEngine:
    """An engine that drafts ``steps`` guesses in every step with one head; None: that drafts none.

    Raises what `actors.body.loading.load` raises, ValueError for a model that cannot draft.
    """

    def __init__(
        self, configuration: EngineConfiguration, draft: Path, head: DraftHead | None, steps: int
    ) -> None:
        self._drafter = None
        if head is not None:
            model = load(draft, configuration.dtype, device="cpu")  # a body and its cache each
            body = draftable(model)
            self._drafter = ModelDrafter(
                body,
                head,
                blocks=-(-body.max_positions // BLOCK_TOKENS),
                vocabulary_size=model.vocabulary_size,
            )
        steady = replace(configuration, draft_length="fixed", draft_tokens=steps)
        self._engine = Engine(steady, drafter=self._drafter)

    def run(
        self, prompts: Sequence[Prompt], parameters: SamplingParameters, turn: int = 0
    ) -> list[float]:
        """Tokens per second, microseconds per guess, rows per guess; the last two 0 without any."""
        before = self._engine.statistics()
        rows = self._drafter.rows if self._drafter else 0
        started = time.perf_counter()
        written = 0
        for number, prompt in enumerate(prompts):
            done = complete_with_seeds(self._engine, [prompt], parameters, [number])
            written += len(done[0].token_ids)
        seconds = time.perf_counter() - started
        after = self._engine.statistics()
        guesses = max(1, after.draft_tokens - before.draft_tokens)
        looked = self._drafter.rows - rows if self._drafter else 0
        drafting = after.draft_seconds - before.draft_seconds
        return [written / seconds, 1e6 * drafting / guesses, looked / guesses]
