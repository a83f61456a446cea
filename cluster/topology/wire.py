"""What the shards of a head send for one token, from what `actors.head.exchange` exchanges.

A threshold goes to all shards; for top-p where a shard's tokens lie and what it knows of the whole
softmax do, too; then candidates and a certificate go to a sampler, of dense rows logits alone, for
the assignment says whose tokens they are. The fp32 hidden state, which goes to all shards at once,
is not counted.
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
    """Bytes that the shard that sends most sends for one token that asks for ``need``; all together
    send at most ``all_shards``. ``full_logits`` is what all of them would send of all logits, and
    ``saving`` how many times more that is."""

    need: str
    per_shard: int
    all_shards: int
    full_logits: int
    saving: float


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
    vocabulary_size: int, rows: tuple[int, ...], left: Mapping[str, float], nucleus_tokens: int
) -> tuple[WireBytes, ...]:
    """Per need what shards with ``rows`` send. ``left`` is of `candidates_left`.

    top-1, top-50: one shard may leave as many as one with every row would, for the best tokens may
    all be its own, and its threshold is that of its own best. top-p, where bounds certify it: each
    tells its ``nucleus_tokens`` best, and sends no more of them. dense (returned logprobs, and
    top-p that bounds do not certify): each sends all of its rows.
    """
    most, full = max(rows), FULL_LOGIT * vocabulary_size
    wanted = {TOP_1: left[TOP_1], TOP_50: left[TOP_50], TOP_P: nucleus_tokens, "dense": most}
    masses = OUTLINE + OUTLINE_BIN * OUTLINE_BINS + PARTIAL_MASS + CANDIDATE * nucleus_tokens
    told = []
    for need, count in wanted.items():
        each = FULL_LOGIT if count >= most else CANDIDATE
        candidates = CANDIDATE_COUNT + each * min(math.ceil(count), most)
        per_shard = THRESHOLD + (masses if need == TOP_P else 0) + candidates + CERTIFICATE
        all_shards = len(rows) * per_shard
        told.append(WireBytes(need, per_shard, all_shards, full, full / all_shards))
    return tuple(told)
