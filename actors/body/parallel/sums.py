"""What the ranks of a decoder of torch add up: embeddings, and the products that lead back to the
hidden states. The decoder's code stays as it is."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from lexshard.kernels.parallel import Exchange

SUMMED = ("o_proj", "down_proj")  # whose columns are divided


class RankLostError(RuntimeError):
    """A rank has gone, has stopped or does not answer, and its group with it."""


class RankSums(Protocol):
    """How one of several ranks adds up what all have. All ask for the same sums in the same
    order."""

    def add(self, values: torch.Tensor) -> None:
        """``values`` become the sum of those of all ranks, in order of the current stream where
        they are on a GPU. Raises RankLostError."""

    def complete(self) -> bool:
        """Waits for what has been started: whether every rank did its part."""


# Of the ranks of a compiled stack, or of a decoder of torch.
RankGroup = Exchange | RankSums


class OneRank:
    """`RankSums` of the only one."""

    def add(self, values: torch.Tensor) -> None: ...

    def complete(self) -> bool:
        return True


class GroupSums:
    """The sums of whichever ``group`` there is: an operator of torch, which compiled layers call as
    they are."""

    def __init__(self) -> None:
        self.group: RankSums = OneRank()
        self._number = len(_GROUPS)
        _GROUPS.append(ref(self))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        _add_up(values, self._number)
        return values


_GROUPS: list[ref[GroupSums]] = []  # by number


@torch.library.custom_op("lexshard::add_up_ranks", mutates_args=("values",))
def _add_up(values: torch.Tensor, number: int) -> None:
    sums = _GROUPS[number]()
    assert sums is not None, "a decoder outlives its sums"
    sums.group.add(values)


@_add_up.register_fake
def _(values: torch.Tensor, number: int) -> None: ...


class SummedProduct(nn.Module):
    """The product of all ranks, of which ``own`` is this one's part, without a bias."""

    def __init__(self, own: nn.Linear, sums: GroupSums) -> None:
        super().__init__()
        self.own = own
        self._sums = sums

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self._sums(self.own(values))


class SummedEmbedding(nn.Module):
    """The embedding of all ranks, of which this one has the ``weight`` [tokens, d] of tokens from
    ``first`` on; multiplied by ``scale``, if there is one."""

    def __init__(
        self, weight: torch.Tensor, first: int, scale: torch.Tensor | None, sums: GroupSums
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._first = first
        self._scale = scale
        self._sums = sums

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        places = token_ids - self._first
        own = (places >= 0) & (places < self.weight.shape[0])
        rows = nn.functional.embedding(torch.where(own, places, 0), self.weight)
        if self._scale is not None:
            rows = rows * self._scale
        # -0.0 leaves all bits of what it is added to.
        return self._sums(torch.where(own[..., None], rows, -0.0))


def add_up(decoder: Any, first_token: int, sums: GroupSums) -> None:
    """``decoder``, which has a rank's part of every weight, computes with all ranks by ``sums``.
    Raises ValueError for a product that has a bias: every rank would add it."""
    for module in list(decoder.modules()):
        for name in SUMMED:
            own = getattr(module, name, None)
            if isinstance(own, nn.Linear):
                if own.bias is not None:
                    raise ValueError(f"{name} has a bias: leave --tensor-parallel out")
                setattr(module, name, SummedProduct(own, sums))
    embedding = decoder.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    weight = embedding.weight.detach()
    scale = None if scale is None else scale.to(weight.dtype)
    decoder.set_input_embeddings(SummedEmbedding(weight, first_token, scale, sums))
