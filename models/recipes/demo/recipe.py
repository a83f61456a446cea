"""Every number that decides how the demo pair is made."""

from __future__ import annotations

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
    """

    children: float = 0.50
    novels: float = 0.12
    dialogues: float = 0.28
    story_chat: float = 0.10
    system_prompt_share: float = 0.30
    story_chat_records: int = 30_000
    held_out_books: int = 3
    held_out_dialogue_prefix: str = "test/"


@dataclass(frozen=True)
class Schedule:
    """Token budget, batch shape and learning rates of one training run.

    Fractions are of the run's steps. The rate glides down slowly from ``glide_from``, on a line
    that would reach zero at ``glide_until``, and falls to zero in the last ``decay_fraction``.
    """

    tokens: int
    batch_tokens: int = 4_096
    micro_tokens: int = 1_024
    sequence: int = 512
    long_sequence: int = 2_048
    long_fraction: float = 0.08
    warmup_steps: int = 20
    glide_from: float = 0.5385
    glide_until: float = 1.5385
    decay_fraction: float = 0.30
    full_softmax_fraction: float = 0.10
    frequent_tokens: int = 3_072
    sampled_tokens: int = 1_024
    muon_rate: float = 0.02
    adam_rate: float = 6e-3
    norm_rate: float = 3e-3
    muon_momentum: float = 0.95
    muon_decay: float = 0.05

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return max(1, self.tokens // self.batch_tokens)

    @property
    def long_start(self) -> int:
        """First step trained on long sequences."""
        return self.steps - round(self.steps * self.long_fraction)

    @property
    def full_softmax_start(self) -> int:
        """First step trained with the whole vocabulary in the softmax."""
        return self.steps - round(self.steps * self.full_softmax_fraction)

    def rate_factor(self, step: int) -> float:
        """Warm-up, stable, slow glide, linear decay to zero."""
        decay_steps = max(1, round(self.steps * self.decay_fraction))
        glide_start = round(self.steps * self.glide_from)
        glide_end = round(self.steps * self.glide_until)
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        glide = (glide_end - step) / max(1, glide_end - glide_start)
        return warm * min(1.0, glide, (self.steps - step) / decay_steps)


@dataclass(frozen=True)
class Measurement:
    """How much held-out text the evaluation reads and writes."""

    held_out_bytes: int = 300_000
    end_prompts: int = 100
    end_tokens: int = 128
    match_prompts: int = 40
    match_tokens: int = 96
    sample_tokens: int = 110
    shipped_prompts: int = 20


@dataclass(frozen=True)
class DemoRecipe:
    """The whole recipe: tokenizer, target, draft and their schedules.

    The target is trained in one pass for each of its schedules; a later pass starts from the
    weights of the one before, with a fresh optimiser and another order of the windows.
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
    target_schedules: tuple[Schedule, ...] = (
        Schedule(tokens=1_300 * 4_096),
        Schedule(
            tokens=500 * 4_096,
            long_fraction=0.12,
            glide_from=1.0,
            glide_until=2.0,
            decay_fraction=0.95,
            full_softmax_fraction=0.25,
            muon_rate=0.012,
            adam_rate=3e-3,
            norm_rate=2e-3,
        ),
    )
    draft_schedule: Schedule = Schedule(
        tokens=1_600 * 4_096,
        long_fraction=0.0,
        glide_from=1.0,
        glide_until=2.0,
        decay_fraction=0.8,
        adam_rate=3e-3,
    )
    measurement: Measurement = field(default_factory=Measurement)
    workers: int = 2
    checkpoint_seconds: float = 300.0

    def with_tokens(self, target: int | None, draft: int | None) -> DemoRecipe:
        """The same recipe with other token budgets."""
        schedules, draft_schedule = self.target_schedules, self.draft_schedule
        if target is not None:
            total = sum(schedule.tokens for schedule in schedules)
            schedules = tuple(
                replace(schedule, tokens=target * schedule.tokens // total)
                for schedule in schedules
            )
        if draft is not None:
            draft_schedule = replace(draft_schedule, tokens=draft)
        return replace(self, target_schedules=schedules, draft_schedule=draft_schedule)
