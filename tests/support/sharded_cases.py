"""Heads in parts, rows that ask them for everything there is to ask, and the tokens drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.need import Need
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.draw import Controls, draw
from lexshard.kernels.quantize import quantize
from tests.support.certificate_heads import Array
from tests.support.penalty_cases import random_adjustment


def shard_of(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    owned: OwnedRows,
    screens: Sequence[str],
    softcap: float | None,
) -> Shard:
    own = weight[torch.from_numpy(owned.ids).long()]
    own_bias = None if bias is None else bias[torch.from_numpy(owned.ids).long()]
    tiers = {name: quantize(own, name) for name in screens}  # type: ignore[arg-type]
    ladder = Ladder(tiers, ((1, screens[0]),)) if screens else None
    size = owned.vocabulary_size
    return Shard(own, own_bias, softcap, 1.0, size, ladder=ladder, owned=owned)


def random_needs(random: np.random.Generator, size: int, rows: int) -> list[Need]:
    """Every kind of need, noise of 64-bit keys, half of them with processors."""
    needs = []
    for _ in range(rows):
        kind = str(random.choice(["top1", "gumbel", "topk", "minp", "nucleus", "epsilon", "dense"]))
        inverse = float(np.float32(1 / random.choice([0.5, 1.0, 1.7])))
        need = Need(
            "top1" if kind == "gumbel" else kind,  # type: ignore[arg-type]
            k=int(random.integers(1, min(size, 60))),
            min_p=float(random.uniform(0.01, 0.5)),
            top_p=float(random.uniform(0.2, 0.95)),
            epsilon=0.3,
            key=int(random.integers(0, 2**64, dtype=np.uint64)),
            position=int(random.integers(0, 5000)),
            inverse_temperature=0.0 if kind == "top1" else inverse,
            adjustment=random_adjustment(random, size) if random.random() < 0.5 else None,
        )
        needs.append(need)
    return needs


def drawn(found: Candidates, needs: Sequence[Need]) -> list[int]:
    """The token that each row's candidates give."""
    truncated = [each.truncated for each in found.certificates]
    controls = Controls(
        np.array([need.inverse_temperature for need in needs]),
        np.array([need.k if need.kind == "topk" else 0 for need in needs]),
        np.array(
            [
                need.top_p if need.kind == "nucleus" and not done else 1.0
                for need, done in zip(needs, truncated, strict=True)
            ]
        ),
        np.array([np.log(need.min_p) if need.kind == "minp" else -np.inf for need in needs]),
        np.array([need.key for need in needs], np.uint64),
        np.array([need.position for need in needs], np.uint64),
    )
    tokens: list[int] = draw(found.ids, found.logits, found.offsets, controls).tolist()
    return tokens


# -- heads that several processes build alike -----------------------------------------------------

ASSIGNMENTS = ("round-robin", "contiguous", "uneven", "tokens")


@dataclass(frozen=True, slots=True)
class HeadCase:
    """A head in ``shards`` parts that every process makes by itself, its own part of it."""

    shards: int
    assignment: str = "round-robin"
    screens: tuple[str, ...] = ()
    size: int = 500
    columns: int = 32
    seed: int = 0
    bias: bool = False
    ties: bool = False
    softcap: float | None = None
    scale: float = 1.0  # of the weights

    def parts(self) -> list[OwnedRows]:
        """The tokens of each shard."""
        ranks, blocks = np.arange(self.shards), np.arange(blocks_of(self.size))
        if self.assignment == "tokens":
            owner = np.random.default_rng(self.seed).permutation(np.arange(self.size) % self.shards)
            return [OwnedRows.of_tokens(np.flatnonzero(owner == r), self.size) for r in ranks]
        if self.assignment == "round-robin":
            owner = blocks % self.shards
        elif self.assignment == "contiguous":
            owner = blocks * self.shards // len(blocks)
        else:
            owner = np.maximum(blocks - len(blocks) + self.shards, 0)  # the first has nearly all
        return [OwnedRows.of_blocks(blocks[owner == r].tolist(), self.size) for r in ranks]

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output rows [V, d] and biases [V]."""
        random = np.random.default_rng(self.seed)
        rows = random.standard_normal((self.size, self.columns), np.float32) * self.scale
        if self.ties:
            rows = rows[random.integers(0, self.size // 4, self.size)]
        bias = random.standard_normal(self.size).astype(np.float32) if self.bias else None
        return torch.from_numpy(
            rows.astype(np.float32)
        ), None if bias is None else torch.from_numpy(bias)

    def shard(self, owned: OwnedRows) -> Shard:
        return shard_of(*self.weights(), owned, self.screens, self.softcap)


def every_kind_of_request(random: np.random.Generator, size: int) -> list[Request]:
    """Greedy, Gumbel, top-k, min-p, top-p and log-probabilities, plain and with processors."""
    kinds = (
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=0.8),
        SamplingParameters(temperature=0.8, top_k=50),
        SamplingParameters(temperature=0.8, min_p=0.05),
        SamplingParameters(temperature=0.5, top_p=0.7),
        SamplingParameters(temperature=1.0, logprobs=2),
    )
    requests = []
    for processed in (False, True):
        for kind in kinds:
            parameters = {name: getattr(kind, name) for name in kind.__slots__}
            parameters["seed"] = int(random.integers(0, 2**63))
            if processed:
                some = random.integers(0, size, 6).tolist()
                parameters |= {
                    "repetition_penalty": float(random.choice([1.3, 0.8])),
                    "frequency_penalty": float(random.choice([0.4, -0.3])),
                    "presence_penalty": 0.2,
                    "logit_bias": ((some[0], 3.0), (some[1], -100.0)),
                    "bad_words": ((some[2],), (some[3], some[4])),
                    "min_tokens": 3,
                    "stop_token_ids": (some[5],),
                }
            prompt = tuple(random.integers(1, size, 8).tolist())
            requests.append(
                Request(f"{len(requests)}", 0, prompt, SamplingParameters(**parameters))
            )
    allowed = tuple(random.integers(0, size, size // 4).tolist())
    requests.append(
        Request("allowed", 0, (1, 2), SamplingParameters(top_k=50, allowed_ids=allowed))
    )
    return requests


def same_candidates(ours: Candidates, theirs: Candidates) -> None:
    """Bit for bit, certificates included."""
    assert ours.offsets.tolist() == theirs.offsets.tolist()
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.raw.tobytes() == theirs.raw.tobytes()
    assert ours.logits.tobytes() == theirs.logits.tobytes()
    assert ours.certificates == theirs.certificates


def hidden_states(random: np.random.Generator, rows: int, columns: int, size: float = 2.0) -> Array:
    return (size * random.standard_normal((rows, columns))).astype(np.float32)
