"""Heads in parts, rows that ask them for everything there is to ask, and the tokens drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.draw import draw
from lexshard.kernels.quantize import quantize
from tests.support.certificate_heads import Array
from tests.support.certificate_needs import KINDS
from tests.support.certificate_needs import random_needs as needs_of_all_kinds


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
    """Every kind of need, half of them with processors."""
    kinds = (*KINDS, "dense")
    shares = [1 / len(kinds)] * len(kinds)
    return list(
        needs_of_all_kinds(random, size, rows, kinds=kinds, shares=shares, adjusted=0.5).needs
    )


def drawn(found: Candidates, needs: Sequence[Need]) -> list[int]:
    """The token that each row's candidates give."""
    done = [each.truncated for each in found.certificates]
    controls = RowTable.of(needs).controls
    controls = controls._replace(top_p=np.where(done, 1.0, controls.top_p))
    return draw(found.ids, found.logits, found.offsets, controls).tolist()


# -- heads that several processes build alike -----------------------------------------------------


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
        bias = random.standard_normal(self.size).astype(np.float32)
        weight = torch.from_numpy(rows.astype(np.float32))
        return weight, torch.from_numpy(bias) if self.bias else None

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
            own: dict[str, Any] = {"seed": int(random.integers(0, 2**63))}
            if processed:
                some = random.integers(0, size, 6).tolist()
                own |= {
                    "repetition_penalty": float(random.choice([1.3, 0.8])),
                    "frequency_penalty": float(random.choice([0.4, -0.3])),
                    "presence_penalty": 0.2,
                    "logit_bias": ((some[0], 3.0), (some[1], -100.0)),
                    "bad_words": ((some[2],), (some[3], some[4])),
                    "min_tokens": 3,
                    "stop_token_ids": (some[5],),
                }
            prompt = tuple(random.integers(1, size, 8).tolist())
            requests.append(Request(f"{len(requests)}", 0, prompt, replace(kind, **own)))
    allowed = tuple(random.integers(0, size, size // 4).tolist())
    few = SamplingParameters(top_k=50, allowed_ids=allowed)
    return [*requests, Request("allowed", 0, (1, 2), few)]


def same_candidates(ours: Candidates, theirs: Candidates) -> None:
    """Bit for bit, certificates included."""
    assert ours.offsets.tolist() == theirs.offsets.tolist()
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.raw.tobytes() == theirs.raw.tobytes()
    assert ours.logits.tobytes() == theirs.logits.tobytes()
    assert ours.certificates == theirs.certificates


def hidden_states(random: np.random.Generator, rows: int, columns: int, size: float = 2.0) -> Array:
    return (size * random.standard_normal((rows, columns))).astype(np.float32)
