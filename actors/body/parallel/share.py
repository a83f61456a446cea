"""What each of several ranks has of a model of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass

from lexshard.kernels.llama import LlamaShape
from lexshard.kernels.parallel import LEAVES


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of rank ``rank`` of ``ranks``: some heads, some columns inside the gated MLP, some
    rows of the embedding. Where there are fewer key-value heads than ranks, several have one."""

    rank: int
    ranks: int
    whole: LlamaShape
    vocabulary_size: int

    @property
    def leaves(self) -> int:
        return LEAVES // self.ranks

    @property
    def heads(self) -> range:
        return self._even(self.whole.heads)

    @property
    def kv_heads(self) -> range:
        group = self.whole.heads // self.whole.kv_heads
        heads = self.heads
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    @property
    def inner(self) -> range:
        """Outputs of the gate and of the up projection, columns of the down projection."""
        return self._even(self.whole.intermediate)

    @property
    def tokens(self) -> range:
        """Rows of the embedding."""
        return self._even(self.vocabulary_size)

    @property
    def shape(self) -> LlamaShape:
        """Of the stack that this rank computes."""
        return self.whole._replace(
            heads=len(self.heads), kv_heads=len(self.kv_heads), intermediate=len(self.inner)
        )

    def _even(self, count: int) -> range:
        return range(self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks)


def columns_of(heads: range, width: int) -> range:
    """Those of some ``heads``, each ``width`` wide, which lie side by side."""
    return range(heads.start * width, heads.stop * width)
