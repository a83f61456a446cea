"""What each of several ranks has of a model of the Llama family, and which models can be shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.actors.body.fused import FAMILIES
from lexshard.kernels.llama import LlamaShape
from lexshard.kernels.parallel import LEAVES

# A leaf holds whole pairs of columns, as products in bfloat16 take them.
_COLUMNS = 2 * LEAVES


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


def check_shared(description: Mapping[str, Any], ranks: int) -> None:
    """Whether ``ranks`` can share the model whose ``config.json`` says ``description``.

    Raises UnsupportedModelError that names what cannot be divided, ValueError for a number of ranks
    that no model is shared by.
    """
    if ranks not in (1, 2, 4, 8):
        raise ValueError(f"--tensor-parallel {ranks}: a body is shared by 1, 2, 4 or 8 ranks")
    family = description.get("model_type", "a model without a type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"--tensor-parallel shares {', '.join(FAMILIES)}, not {family}: leave it out"
        )
    heads = int(description.get("num_attention_heads") or 0)
    hidden = int(description.get("hidden_size") or 0)
    if not heads or not hidden:
        raise UnsupportedModelError(
            f"this {family} does not say its hidden_size and num_attention_heads: leave "
            "--tensor-parallel out"
        )
    kv_heads = int(description.get("num_key_value_heads") or heads)
    width = int(description.get("head_dim") or hidden // heads)
    inner = int(description.get("intermediate_size") or 0)
    if heads % ranks:
        raise _indivisible(family, "num_attention_heads", heads, ranks)
    if kv_heads % ranks and ranks % kv_heads:
        raise _indivisible(family, "num_key_value_heads", kv_heads, ranks)
    for name, columns in (
        ("num_attention_heads x head_dim", heads * width),
        ("intermediate_size", inner),
    ):
        if not columns or columns % _COLUMNS:
            raise UnsupportedModelError(
                f"{name} of this {family} are {columns}, which is no multiple of {_COLUMNS}, so "
                "that its sums have no leaves of equal size: leave --tensor-parallel out"
            )


def _indivisible(family: str, name: str, count: int, ranks: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} of this {family} are {count}, which {ranks} ranks cannot share: give "
        "--tensor-parallel a number that divides it"
    )
