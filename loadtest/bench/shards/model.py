"""A MODEL of a step's time with more shards than are at hand. Nothing here has been run.

    step(N) = screen bytes / (N * memory bandwidth) + rescored bytes / memory bandwidth
              + hops * latency of the link + bytes of all servers / bandwidth of the link

Screening is the reading of a low-precision tier; every shard rescores as many rows as it would
alone, for each has leaders of its own. Messages go between the root and every server by
themselves, as `cluster.collective.star` does it; between GPUs NCCL broadcasts hidden states. Left
out: launches of kernels, arithmetic that memory does not hide, the draw, all contention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lexshard.cluster.collective.star import FRAME_BYTES
from lexshard.loadtest.bench.shards.published import Link

LARGEST = 64
HOPS = 5  # announcement, hidden states, thresholds there and back, candidates
# Bytes per row: of the announcement, of thresholds both ways, of a certificate, of a candidate.
ANNOUNCED, THRESHOLDS, CERTIFICATE, CANDIDATE = 50, 32, 56, 8
TIER_OVERHEAD = 16  # bytes per row of an int8 tier besides its columns
WORTH_ITS_SHARDS = 0.5


@dataclass(frozen=True, slots=True)
class HeadSize:
    """A head in bf16 and an int8 tier, and steps of ``batch`` rows that take ``candidates`` per
    token. Every shard rescores ``rescored`` rows per token."""

    vocabulary: int
    columns: int
    batch: int
    candidates: float
    rescored: float

    @property
    def screen_bytes(self) -> int:
        return self.vocabulary * (self.columns + TIER_OVERHEAD)

    @property
    def rescored_bytes(self) -> float:
        return self.batch * self.rescored * 2 * self.columns

    @property
    def hidden_bytes(self) -> int:
        return self.batch * 4 * self.columns

    def server_bytes(self, shards: int) -> int:
        """Sent and received by the root in a step for each server, hidden states apart."""
        announced = _message(ANNOUNCED * self.batch)
        own = math.ceil(self.candidates / shards)
        answered = _message(self.batch * (CERTIFICATE + CANDIDATE * own))
        return announced + self.batch * THRESHOLDS + answered


def _message(length: float) -> int:
    """A message begins with a frame that nearly always holds it."""
    return max(FRAME_BYTES, math.ceil(length) + 8)


@dataclass(frozen=True, slots=True)
class StepModel:
    """The modelled step of ``head`` on devices of ``memory_bandwidth`` (bytes/s) that ``link``
    connects."""

    head: HeadSize
    memory_bandwidth: float
    link: Link

    def compute(self, shards: int) -> float:
        """Microseconds of every shard."""
        read = self.head.screen_bytes / shards + self.head.rescored_bytes
        return 1e6 * read / self.memory_bandwidth

    def exchange(self, shards: int) -> float:
        """Microseconds of hops and bytes."""
        if shards == 1:
            return 0.0
        copies = 1 if self.link.broadcasts else shards - 1
        carried = (shards - 1) * self.head.server_bytes(shards) + copies * self.head.hidden_bytes
        return HOPS * self.link.hop(shards) + 1e6 * carried / self.link.bandwidth

    def step(self, shards: int) -> float:
        """Microseconds."""
        return self.compute(shards) + self.exchange(shards)

    def speed_up(self, shards: int) -> float:
        """Against one shard."""
        return self.step(1) / self.step(shards)

    def fastest(self) -> int:
        """The number of shards beyond which a step takes longer again, or the largest looked at."""
        return min(range(1, LARGEST + 1), key=self.step)

    def worth_it(self) -> int:
        """The largest number of shards that is at least half as many times faster than one."""
        return max(
            shards
            for shards in range(1, LARGEST + 1)
            if self.speed_up(shards) >= WORTH_ITS_SHARDS * shards
        )


def models(
    heads: Iterable[HeadSize], links: Iterable[Link], memory_bandwidth: float
) -> list[StepModel]:
    """Every head over every link."""
    links = tuple(links)
    return [StepModel(head, memory_bandwidth, link) for head in heads for link in links]
