"""What the benchmark of shards asks for: a head to cut in parts, needs, and the tokens drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.configuration import TierName
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.part import ShardPart, cut_head
from lexshard.actors.states.need import Need
from lexshard.cluster.topology.assignment import assign
from lexshard.kernels.draw import Controls, draw
from lexshard.loadtest.bench.head.workload import SAMPLING_METHODS, HeadWorkload

TOP_P = 0.9
TOP_P_TEMPERATURE = 0.3  # at 1 a synthetic head has no nucleus that bounds could decide


def _top_p(key: int, position: int) -> Need:
    inverse = 1 / TOP_P_TEMPERATURE
    return Need("nucleus", top_p=TOP_P, key=key, position=position, inverse_temperature=inverse)


NEEDS: dict[str, Callable[[int, int], Need]] = {  # of a key and a position
    **{name: SAMPLING_METHODS[name].need for name in ("greedy", "gumbel", "top50")},
    "top-p": _top_p,
}


@dataclass(frozen=True, slots=True, eq=False)
class ShardWorkload:
    """A head whose rows are screened with ``tier``, and hidden states."""

    head: HeadWorkload
    tier: TierName
    largest_batch: int

    def parts(self, shards: int) -> list[ShardPart]:
        """The head in as many shards, blocks of 64 tokens dealt out in turn."""
        size = len(self.head.weight)
        whole = ShardPart(
            weight=self.head.weight,
            bias=self.head.bias,
            softcap=self.head.softcap,
            scale=self.head.scale,
            owned=OwnedRows.every(size),
            eos_ids=(0,),
            largest=self.largest_batch,
            tiers=(self.tier,),
        )
        assignment = assign("blocks-round-robin", size, shards)
        return cut_head(whole, [assignment.owned(shard) for shard in range(shards)])

    def step(
        self, need: str, batch: int, number: int
    ) -> tuple[npt.NDArray[np.float32], list[Need]]:
        """Hidden states [batch, d] and needs of a step; every step has others."""
        wanted = [NEEDS[need](key, number) for key in range(batch)]
        return self.head.states(number, batch), wanted


def drawn(found: Candidates, needs: Sequence[Need]) -> npt.NDArray[np.int64]:
    """The token [N] that each row's candidates give, by the served noise."""
    whole = [need.kind == "nucleus" for need in needs]
    top_p = [
        need.top_p if nucleus and not each.truncated else 1.0
        for need, nucleus, each in zip(needs, whole, found.certificates, strict=True)
    ]
    controls = Controls(
        inverse_temperature=np.array([need.inverse_temperature for need in needs]),
        top_k=np.array([need.k for need in needs], np.int64),
        top_p=np.array(top_p),
        log_min_p=np.full(len(needs), -np.inf),
        key=np.array([need.key for need in needs], np.uint64),
        position=np.array([need.position for need in needs], np.uint64),
    )
    return draw(found.ids, found.logits, found.offsets, controls)
