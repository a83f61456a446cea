"""Tokens per second with each draft head in the engine itself, which draft alike and take turns.

One request at a time, always the same number of guesses: what is chosen elsewhere, how far to
guess, would hide what a head costs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.loading import draftable
from lexshard.actors.drafter.model import ModelDrafter
from lexshard.actors.engine.completion import complete_with_seeds
from lexshard.actors.engine.engine import Engine
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import SamplingParameters
from lexshard.kernels.draft import DraftHead
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report

PLAIN = "no drafts"

SPEED = Measure("speed", "tokens/s", higher_is_better=True)
DRAFTING = Measure("drafting", "us per guess", higher_is_better=False)
SHORTLIST = Measure("shortlist", "rows per guess", higher_is_better=False)

Prompt = tuple[int, ...]


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

    def run(self, prompts: Sequence[Prompt], parameters: SamplingParameters) -> list[float]:
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


def record_speed(
    report: Report,
    engines: Mapping[str, DraftingEngine],
    prompts: Sequence[Prompt],
    parameters: SamplingParameters,
    runs: int,
    ours: str,
) -> None:
    """``runs`` turns of every engine over the prompts, after one that warms up."""
    figures: dict[str, list[list[float]]] = {name: [] for name in engines}
    for turn in range(runs + 1):
        for name, engine in engines.items():
            figure = engine.run(prompts, parameters)
            if turn:
                figures[name].append(figure)
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
