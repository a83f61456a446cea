"""Which tokens of the vocabulary the rows of a shard are.

Noise belongs to blocks of 64 consecutive token ids, so a shard that owns whole blocks draws the
noise of each once. One that owns other rows (clusters, say) draws it token by token, at a hundred
times the price. Rows are kept in order of token id whatever the order they were given in, so that
what is first among rows is first among tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.masks import Words, rows_of_mask
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.search import Estimates

Ids = npt.NDArray[np.int32]


def check_complete(parts: Sequence[Ids], vocabulary_size: int) -> None:
    """Raises ValueError where the ``parts`` that shards own lack a token or have one twice."""
    if not np.array_equal(np.sort(np.concatenate(parts)), np.arange(vocabulary_size)):
        raise ValueError("shards of a head own every token of the vocabulary once")


@dataclass(frozen=True, slots=True, eq=False)
class OwnedRows:
    """Row ``i`` of a shard is token ``ids[i]`` of ``vocabulary_size``; see the constructors."""

    ids: Ids  # [n] ascending
    vocabulary_size: int
    by_block: bool
    whole: bool = False  # row i is token i, for every token

    @classmethod
    def every(cls, vocabulary_size: int) -> OwnedRows:
        """All tokens: row ``i`` is token ``i``."""
        return cls(np.arange(vocabulary_size, dtype=np.int32), vocabulary_size, True, True)

    @classmethod
    def of_blocks(cls, block_ids: Sequence[int], vocabulary_size: int) -> OwnedRows:
        """The tokens of blocks ``64 b .. 64 b + 63``, any blocks in any order.

        Raises ValueError for none, for one that is given twice and for one beyond the vocabulary.
        """
        blocks = np.array(sorted(block_ids), np.int64)
        if not len(blocks):
            raise ValueError("a shard owns at least one block")
        if len(np.unique(blocks)) < len(blocks):
            raise ValueError("a shard owns a block once: block_ids has one twice")
        if blocks[0] < 0 or blocks[-1] >= blocks_of(vocabulary_size):
            raise ValueError(
                f"block_ids are from 0 to {blocks_of(vocabulary_size) - 1} for a vocabulary of "
                f"{vocabulary_size}"
            )
        ids = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        own = ids[ids < vocabulary_size].astype(np.int32)
        return cls(own, vocabulary_size, True, whole=len(own) == vocabulary_size)

    @classmethod
    def of_tokens(cls, token_ids: npt.NDArray[np.integer], vocabulary_size: int) -> OwnedRows:
        """Any tokens, whose noise is drawn one by one. Raises ValueError for none, for one that is
        given twice and for one beyond the vocabulary."""
        ids = np.unique(token_ids)
        if not len(ids) or len(ids) < len(token_ids):
            raise ValueError("a shard owns at least one token, and each once")
        if ids[0] < 0 or ids[-1] >= vocabulary_size:
            raise ValueError(f"a shard owns tokens from 0 to {vocabulary_size - 1}")
        return cls(ids.astype(np.int32), vocabulary_size, False)

    def tokens(self, rows: Ids) -> Ids:
        """The token ids of ``rows``."""
        return rows if self.whole else self.ids[rows]

    def rows(self, tokens: Ids) -> Ids:
        """The rows that ``tokens`` are, all of which this shard owns."""
        return tokens if self.whole else np.searchsorted(self.ids, tokens).astype(np.int32)

    def among(self, tokens: Ids) -> Ids:
        """The rows that some of the sorted ``tokens`` are: what is of other shards is left out."""
        if self.whole:
            return tokens[: np.searchsorted(tokens, len(self.ids))]
        return self._own(tokens, np.zeros(1, np.int64))[0]

    def locate(self, estimates: Estimates) -> Estimates:
        """``estimates`` of these rows, with what their noise is drawn by."""
        if self.whole:
            return estimates
        return estimates._replace(token_ids=self.ids, by_block=self.by_block)

    def of_rows(self, adjustments: Adjustments) -> Adjustments:
        """``adjustments`` of tokens as adjustments of rows: what is of other shards is left out.

        Tables of what was seen are gathered, one entry per row of the shard.
        """
        if self.whole or not adjustments.active.any():
            return adjustments
        a = adjustments
        bias_ids, bias_offsets, kept = self._own(a.bias_ids, a.bias_offsets)
        banned, banned_offsets, _ = self._own(a.banned, a.banned_offsets)
        seen = a.table >= 0
        return a._replace(
            tables=a.tables[a.table[seen][:, None], self.ids],
            table=np.where(seen, np.cumsum(seen) - 1, -1),
            bias_ids=bias_ids,
            bias_values=a.bias_values[kept],
            bias_offsets=bias_offsets,
            banned=banned,
            banned_offsets=banned_offsets,
            masks=self._own_masks(a.masks) if len(a.masks) else a.masks,
        )

    def _own_masks(self, masks: Words) -> Words:
        """``masks`` [M, B] of tokens as masks of rows. Whole blocks have whole words."""
        if self.by_block:
            return np.ascontiguousarray(masks[:, self.ids[::BLOCK] // BLOCK])
        return rows_of_mask(masks, self.ids)

    def _own(
        self, ids: Ids, offsets: npt.NDArray[np.int64]
    ) -> tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Those of ragged ``ids`` that are rows here, as rows, and which were kept."""
        rows = np.searchsorted(self.ids, ids)
        kept = self.ids[np.minimum(rows, len(self.ids) - 1)] == ids
        counts = np.concatenate([[0], np.cumsum(kept)])
        return rows[kept].astype(np.int32), counts[offsets].astype(np.int64), kept
