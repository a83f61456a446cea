"""The engine's running counts, from which every step's ``EngineStatistics`` is taken."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal

from lexshard.actors.decision.plane import PlaneCounters
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.head.screens import DENSE
from lexshard.actors.head.sequence_head import ShardCounters
from lexshard.actors.messages import STEP_SECONDS, Certificate, EngineStatistics

# Every step takes a snapshot: one call reads all of ``Counters``, in the message's own order.
_counted = attrgetter(*(item.name for item in fields(EngineStatistics) if not item.kw_only))


Phase = Literal["body", "head", "decide", "exchange"]
PHASES: tuple[Phase, ...] = ("body", "head", "decide", "exchange")


def _no_seconds() -> dict[Phase, list[float]]:
    """Of each phase, nothing observed: a count per bound, one beyond them, and the sum."""
    return {phase: [0.0] * (len(STEP_SECONDS) + 2) for phase in PHASES}


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; times in seconds. ``EngineStatistics`` describes them."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    cached_prompt_tokens: int = 0
    finished_prompt_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    body_seconds: float = 0.0
    head_seconds: float = 0.0
    decide_seconds: float = 0.0
    draft_steps: int = 0
    draft_tokens: int = 0
    draft_accepted_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    head_rows: int = 0
    head_certified_rows: int = 0
    head_rescored_rows: int = 0
    head_opened_share: float = 0.0
    head_tightness: float = 0.0
    head_tightness_rows: int = 0
    head_bytes: int = 0
    head_fallbacks: int = 0
    head_rows_by_tier: Counter[str] = field(default_factory=Counter)
    step_seconds: dict[Phase, list[float]] = field(default_factory=_no_seconds)
    _decided: float = 0.0  # decide_seconds when a step last ended

    def observe(self, phase: Phase, seconds: float, steps: int = 1) -> None:
        """What each of so many ``steps`` spent on ``phase``."""
        observed = self.step_seconds[phase]
        observed[bisect_left(STEP_SECONDS, seconds)] += steps
        observed[-1] += seconds * steps

    def step_decided(self, steps: int = 1) -> None:
        """The decisions of ``steps`` have come: what they took, asking and waiting, was their
        own."""
        self.observe("decide", (self.decide_seconds - self._decided) / steps, steps)
        self._decided = self.decide_seconds

    def steps_took(self, steps: int, body: float, head: float) -> None:
        """The ``steps`` of a run took so many seconds in all, decisions with the head."""
        self.steps += steps
        self.body_seconds += body
        self.head_seconds += head
        self.observe("body", body / steps, steps)
        self.observe("head", head / steps, steps)

    def count_guesses(self, drafted: int, stood: int) -> None:
        """A step verified so many guesses for a sequence."""
        self.draft_tokens += drafted
        self.draft_accepted_tokens += stood
        self.draft_steps += 1

    def count_certificates(self, certificates: Iterable[Certificate]) -> None:
        for certificate in certificates:
            self.head_rows += 1
            dense = certificate.tier == DENSE or certificate.guarantee == "dense"
            self.head_certified_rows += not dense
            self.head_rescored_rows += certificate.rescored_rows
            self.head_opened_share += certificate.opened_share
            self.head_tightness += certificate.tightness
            self.head_tightness_rows += certificate.tightness > 0
            self.head_rows_by_tier[certificate.tier] += 1
            self.head_bytes += certificate.bytes_read
            self.head_fallbacks += certificate.fallback

    def snapshot(
        self, scheduler: Scheduler, plane: PlaneCounters, shards: ShardCounters
    ) -> EngineStatistics:
        pool = scheduler.pool
        traffic = shards.traffic.items()
        return EngineStatistics(
            *_counted(self),
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_blocks_total=pool.count,
            kv_blocks_used=pool.used,
            kv_blocks_cached=pool.cached,
            preemptions=scheduler.preemptions,
            sampler_busy_seconds=plane.busy,
            sampler_wait_seconds=plane.wait,
            sampler_hidden_seconds=plane.hidden,
            samplers_lost=plane.lost,
            shards_lost=shards.regroupings,
            shard_wait_seconds=shards.seconds,
            exchange_calls={name: each.calls for name, each in traffic},
            exchange_bytes_sent={name: each.bytes_sent for name, each in traffic},
            exchange_bytes_received={name: each.bytes_received for name, each in traffic},
            exchange_seconds={name: 1e-6 * each.microseconds for name, each in traffic},
            head_rows_by_tier=dict(self.head_rows_by_tier),
            step_seconds={phase: [*seen] for phase, seen in self.step_seconds.items()},
        )
