"""Every number that decides how the demo pair is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class NetworkShape:
    """Dimensions of one Llama-style network with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 16_384
    positions: int = 2_048
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class Mixture:
    """Share of the training windows drawn from each kind of text.

    ``children`` and ``novels`` are matched against file names; prose files that match neither are
    used only when no file of the folder matches, and then share the prose weight by size.

    The texts give 13.4 M tokens of children's stories, 19.7 M of novels, 4.5 M of dialogues and
    2.5 M of story chat. In the 38 M tokens of the target these shares read the stories once, half
    of the novels, the dialogues twice and the story chat once.
    """

    children: float = 0.38
    novels: float = 0.30
    dialogues: float = 0.24
    story_chat: float = 0.08
    system_prompt_share: float = 0.30
    story_chat_records: int = 30_000
    held_out_books: int = 3
    held_out_dialogue_prefix: str = "test/"


@dataclass(frozen=True)
class Schedule:
    """Token budget, batch shape and learning rates of one training run.

    Fractions are of the run's steps. The rate warms up, stays, and falls on a line to zero in the
    last ``decay_fraction``. What the steps before that do does not depend on the budget, so a run
    can end earlier than it was meant to: `ended_early`. The weights' average reaches back over
    ``average_fraction`` of the steps done; 0 keeps none.
    """

    tokens: int
    batch_tokens: int = 4_096
    micro_tokens: int = 1_024
    sequence: int = 512
    long_sequence: int = 2_048
    long_fraction: float = 0.08
    warmup_steps: int = 20
    decay_fraction: float = 0.40
    full_softmax_fraction: float = 0.10
    frequent_tokens: int = 3_072
    sampled_tokens: int = 1_024
    muon_rate: float = 0.02
    adam_rate: float = 6e-3
    norm_rate: float = 3e-3
    muon_momentum: float = 0.95
    muon_decay: float = 0.05
    average_fraction: float = 0.0

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return max(1, self.tokens // self.batch_tokens)

    @property
    def decay_start(self) -> int:
        """First step of the final decay."""
        return self.steps - max(1, round(self.steps * self.decay_fraction))

    @property
    def long_start(self) -> int:
        """First step trained on long sequences."""
        return self.steps - round(self.steps * self.long_fraction)

    @property
    def full_softmax_start(self) -> int:
        """First step trained with the whole vocabulary in the softmax."""
        return self.steps - round(self.steps * self.full_softmax_fraction)

    def rate_factor(self, step: int) -> float:
        """Warm-up, stable, linear decay to zero."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return warm * min(1.0, (self.steps - step) / (self.steps - self.decay_start))

    def average_rate(self, step: int) -> float:
        """How far the average of the weights moves to the weights after ``step``."""
        return min(1.0, 1.0 / (self.average_fraction * (step + 1)))

    def ended_early(self, step: int, share: float) -> Schedule:
        """The run whose final decay, ``share`` of its steps, begins at ``step``."""
        steps = max(step + 1, math.ceil(step / (1.0 - share)))
        return replace(self, tokens=steps * self.batch_tokens, decay_fraction=share)


@dataclass(frozen=True)
class Measurement:
    """How much held-out text the evaluation reads and writes."""

    held_out_bytes: int = 300_000
    end_prompts: int = 100
    end_tokens: int = 128
    match_prompts: int = 40
    match_tokens: int = 96
    sample_prompts: int = 10
    sample_tokens: int = 110
    shipped_prompts: int = 20


@dataclass(frozen=True)
class DemoRecipe:
    """The whole recipe: tokenizer, target, draft and their schedules.

    The target's budget is 6.3 hours of two cores at 1,680 tokens a second. Its rates lie between
    those of the first demo's two passes, 0.02 and 0.012 for Muon, for a run of five times the steps
    wants lower ones; they were not measured at this length.
    """

    tokenizer_sample_bytes: int = 20_000_000
    mixture: Mixture = field(default_factory=Mixture)
    target: NetworkShape = field(
        default_factory=lambda: NetworkShape(
            hidden=256, layers=4, heads=4, kv_heads=2, intermediate=704
        )
    )
    draft: NetworkShape = field(
        default_factory=lambda: NetworkShape(
            hidden=96, layers=2, heads=2, kv_heads=2, intermediate=256
        )
    )
    target_schedule: Schedule = Schedule(
        tokens=9_300 * 4_096,
        warmup_steps=100,
        muon_rate=0.014,
        adam_rate=4e-3,
        norm_rate=2e-3,
        average_fraction=0.05,
    )
    draft_schedule: Schedule = Schedule(
        tokens=1_600 * 4_096, long_fraction=0.0, decay_fraction=0.8, adam_rate=3e-3
    )
    measurement: Measurement = field(default_factory=Measurement)
    workers: int = 2
    checkpoint_seconds: float = 180.0

    def with_tokens(self, target: int | None, draft: int | None) -> DemoRecipe:
        """The same recipe with other token budgets."""
        target_schedule, draft_schedule = self.target_schedule, self.draft_schedule
        if target is not None:
            target_schedule = replace(target_schedule, tokens=target)
        if draft is not None:
            draft_schedule = replace(draft_schedule, tokens=draft)
        return replace(self, target_schedule=target_schedule, draft_schedule=draft_schedule)
