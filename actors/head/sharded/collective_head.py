"""The root of a sharded head: one head whose other shards live in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Collective, CollectiveError
from lexshard.actors.head.output_head import Hidden
from lexshard.actors.head.output_rows import refuse_unsound
from lexshard.actors.head.owned_rows import check_complete
from lexshard.actors.head.sharded.announcements import (
    EndAnnouncement,
    Introduction,
    announce,
    decode_introduction,
)
from lexshard.actors.head.sharded.rounds import AnyShard, introduce, rounds_of
from lexshard.actors.packed_arrays import encode
from lexshard.actors.states.deltas import NO_DELTAS, Deltas
from lexshard.actors.states.mask import ToldMasks
from lexshard.actors.states.row_table import RowNames, RowTable


class CollectiveHead:
    """``shard``, which owns ``owned_ids``, and those that the other ranks of ``collective`` serve
    (`actors.head.sharded.shard_server.ShardServer`), as one head.

    Answers are bit for bit those of the same shards in one process, and the tokens that can be
    drawn those of one shard with every row. Returns when every server has introduced itself.

    Where anything fails in the midst of a step, the shards are out of step: the group is closed,
    and all that is asked later raises `CollectiveError`. ``traffic`` counts what is exchanged.

    Raises ValueError where tokens are missing or owned twice, and `CollectiveError` where a server
    does not come.
    """

    def __init__(
        self, shard: AnyShard, owned_ids: npt.NDArray[np.int32], collective: Collective
    ) -> None:
        if collective.rank != ROOT:
            raise ValueError(f"the head is rank {ROOT} of its group, not {collective.rank}")
        self.vocabulary_size = shard.vocabulary_size
        self.traffic = collective.traffic
        self._collective = collective
        self._news: list[Deltas] = []
        self._masks = ToldMasks()
        self._failed: CollectiveError | None = None
        own = introduce(shard, owned_ids)
        with self._in_step():
            others = self._collective.gather(encode(own))[1:]
            shards = [own, *(decode_introduction(other) for other in others)]
            _check_owners(shards)
            self._step = rounds_of(shard, shards, collective)

    def tell(self, deltas: Deltas) -> None:
        """What happened to sequences, for the states of the others: told with the next step."""
        if deltas != NO_DELTAS:
            self._news.append(deltas)

    def candidates(
        self, hidden: Hidden, rows: RowTable, names: RowNames | None = None
    ) -> Candidates:
        """The candidates of all shards for ``rows`` with hidden states ``hidden`` [N, d], with one
        certificate per row.

        Rows with processors need ``names``. Raises `NonFiniteHiddenError` naming the rows that
        contain NaN or infinity, and ValueError for what cannot be asked; both leave the group as it
        was.
        """
        states = torch.as_tensor(hidden, dtype=torch.float32).detach().contiguous()
        if len(rows) != len(states):
            raise ValueError(f"{len(states)} hidden states of {len(rows)} rows")
        refuse_unsound(torch.isfinite(states).all(dim=1).cpu().numpy())
        columns = states.shape[1]
        announcement = announce(rows, names, columns, self._masks, tuple(self._news))
        with self._in_step():
            self._news = []
            self._collective.broadcast(encode(announcement))
            shared = self._collective.broadcast_hidden(states, len(rows), columns)
            found = self._step.take(shared, rows)
        assert found is not None
        return found

    def close(self) -> None:
        """Sends the servers home, those that are there, and leaves the group. Closing twice is
        harmless."""
        if self._failed is None:
            with suppress(CollectiveError), self._in_step():
                self._collective.broadcast(encode(EndAnnouncement()))
            self._failed = CollectiveError("this head has been closed")
        self._collective.close()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What goes wrong in here leaves the others waiting: the group is closed for them to
        notice."""
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except BaseException as error:
            self._failed = (
                error
                if isinstance(error, CollectiveError)
                else CollectiveError(f"a step of this head failed: {error}")
            )
            self._collective.close()
            raise


def _check_owners(shards: Sequence[Introduction]) -> None:
    sizes = sorted({shard.vocabulary_size for shard in shards})
    if len(sizes) > 1:
        raise ValueError(
            f"shards of vocabularies of {' and '.join(map(str, sizes))} tokens: "
            "every process must load the same model"
        )
    check_complete([shard.ids for shard in shards], sizes[0])
