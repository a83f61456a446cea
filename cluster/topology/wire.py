"""What the shards of a head send for one token, from what `actors.head.exchange` exchanges.

A threshold goes to all shards; for top-p where a shard's tokens lie and what it knows of the whole
softmax do, too; then candidates and a certificate go to a sampler, of dense rows logits alone, for
the assignment says whose tokens they are. The hidden state that every shard gets is not counted
here but apart (`hidden_state_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lexshard.actors.head.shard import WORTH_REFINING
from lexshard.actors.index.metadata import Metadata

THRESHOLD = 8  # float64
CANDIDATE = 4 + 4  # token id, canonical logit
CANDIDATE_COUNT = 8
# Need, guarantee, tier and fallback; rescored rows, bytes, share, tightness, probability.
CERTIFICATE = 4 + 5 * 8
# What a shard says of where its tokens lie: three numbers, and per bin how many and how uncertain.
OUTLINE, OUTLINE_BIN, OUTLINE_BINS = 3 * 8, 4 + 4, 768
PARTIAL_MASS = 3 * 8 + 8 + 8  # two bounds, the largest, how many others, how many tokens
FULL_LOGIT = 4  # what an all-gather of the logits sends per token of the vocabulary

TOP_1, TOP_50, TOP_P = "top-1", "top-50", "top-p certified"


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes that the one of ``shards`` that sends most sends for one token that asks for ``need``;
    all together send at most as many times that. ``full_logits`` is what all of them would send of
    all logits."""

    need: str
    shards: int
    thresholds: int
    masses: int
    candidates: int
    certificates: int
    full_logits: int

    @property
    def per_shard(self) -> int:
        return self.thresholds + self.masses + self.candidates + self.certificates

    @property
    def all_shards(self) -> int:
        return self.shards * self.per_shard

    @property
    def saving(self) -> float:
        """Full logits over what is sent instead."""
        return self.full_logits / self.all_shards


def hidden_state_bytes(hidden_size: int) -> int:
    """The fp32 hidden state of one token, sent to all shards at once."""
    return FULL_LOGIT * hidden_size


def candidates_left(metadata: Metadata | None, tiers: tuple[str, ...]) -> dict[str, float]:
    """Tokens that a search of the whole vocabulary leaves to be rescored, by need: the most that
    any of ``tiers`` left on average in the calibration of the index. Without an index those that
    are asked for, as if bounds were tight."""
    left = {TOP_1: 1.0, TOP_50: 50.0}
    if metadata is not None:
        for tier in tiers:
            if tier in metadata.tiers:
                found = metadata.tiers[tier].tightness
                refined = found.kept if found.refined is None else found.refined
                for need, most in left.items():
                    # Few are rescored at once; more are refined first.
                    few = min(found.kept[need], WORTH_REFINING)
                    left[need] = max(most, few, refined[need])
    return left


def wire_bytes(
    vocabulary_size: int,
    rows: tuple[int, ...],
    left: Mapping[str, float],
    nucleus_tokens: int,
) -> tuple[WireBytes, ...]:
    """Per need what shards with ``rows`` send. ``left`` is of `candidates_left`.

    top-1, top-50: one shard may leave as many as one with every row would, for the best tokens may
    all be its own, and its threshold is that of its own best. top-p, where bounds certify it: each
    tells its ``nucleus_tokens`` best, and sends no more of them. dense (returned logprobs, and
    top-p that bounds do not certify): each sends all of its rows.
    """
    shards = len(rows)
    counts = {
        TOP_1: left[TOP_1],
        TOP_50: left[TOP_50],
        TOP_P: nucleus_tokens,
        "dense": max(rows),
    }
    return tuple(
        WireBytes(
            need=need,
            shards=shards,
            thresholds=THRESHOLD,
            masses=_masses(nucleus_tokens) if need == TOP_P else 0,
            candidates=CANDIDATE_COUNT
            + (FULL_LOGIT if count >= max(rows) else CANDIDATE) * min(math.ceil(count), max(rows)),
            certificates=CERTIFICATE,
            full_logits=FULL_LOGIT * vocabulary_size,
        )
        for need, count in counts.items()
    )


def _masses(nucleus_tokens: int) -> int:
    """Of a row of top-p, with as many bins as an outline can have."""
    outline = OUTLINE + OUTLINE_BIN * OUTLINE_BINS
    return outline + PARTIAL_MASS + CANDIDATE * nucleus_tokens
