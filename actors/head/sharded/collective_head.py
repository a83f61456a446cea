"""The root of a sharded head: one `OutputHead` whose other shards live in other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.collective import ROOT, Collective, CollectiveError
from lexshard.actors.head.output_head import Hidden, Screening, Thresholds
from lexshard.actors.head.output_rows import refuse_unsound
from lexshard.actors.head.sharded.announcements import (
    Announcement,
    EndAnnouncement,
    Introduction,
    StepAnnouncement,
    announced_rows,
    decode_introduction,
    encode_announcement,
    encode_introduction,
)
from lexshard.actors.head.sharded.rounds import AnyShard, introduce, rounds_of
from lexshard.actors.head.sharded.step import AgreedScreening
from lexshard.actors.states.deltas import NO_DELTAS, Deltas
from lexshard.actors.states.row_table import RowNames, RowTable


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveScreening(Screening):
    """What the root's own shard has found, and what all have agreed on."""

    agreed: AgreedScreening


class CollectiveHead:
    """``shard``, which owns ``owned_ids``, and those that the other ranks of ``collective`` serve
    (`actors.head.sharded.shard_server.ShardServer`), as one head.

    Answers are bit for bit those of a `ShardGroup` of the same shards, and the tokens that can be
    drawn those of one shard with every row. Returns when every server has introduced itself.

    Steps come one after the other: what is screened is rescored before the next is screened. Where
    anything fails in the midst of a step, the shards are out of step: the group is closed, and all
    that is asked later raises `CollectiveError`. ``traffic`` counts what is exchanged.

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
        self._failed: CollectiveError | None = None
        self._screened = False
        own = introduce(shard, owned_ids)
        with self._in_step():
            others = self._collective.gather(encode_introduction(own))[1:]
            shards = [own, *(decode_introduction(other) for other in others)]
            _check_owners(shards)
            self._step = rounds_of(shard, shards, collective)

    def tell(self, deltas: Deltas) -> None:
        """What happened to sequences, for the states of the others: told with the next step."""
        if deltas != NO_DELTAS:
            self._news.append(deltas)

    def screen(self, hidden: Hidden, rows: RowTable, names: RowNames | None = None) -> Thresholds:
        """Thresholds of ``rows`` with hidden states ``hidden`` [N, d] that hold for all shards.

        Rows with processors need ``names``. Raises `NonFiniteHiddenError` naming the rows that
        contain NaN or infinity, and ValueError for what cannot be asked; both leave the group as it
        was.
        """
        if self._screened:
            raise ValueError("a step was screened and not rescored: shards take one at a time")
        states = torch.as_tensor(hidden, dtype=torch.float32).detach().contiguous()
        if len(rows) != len(states):
            raise ValueError(f"{len(states)} hidden states of {len(rows)} rows")
        refuse_unsound(torch.isfinite(states).all(dim=1).cpu().numpy())
        columns = states.shape[1]
        asked = announced_rows(rows, names)
        with self._in_step():
            self._announce(StepAnnouncement(asked, columns, self._take_news()))
            shared = self._collective.broadcast_hidden(states, len(rows), columns)
            agreed = self._step.screen(shared, rows)
        self._screened = True
        own = agreed.thresholds
        return Thresholds(own.tau, own.rows, CollectiveScreening(agreed))

    def rescore(self, thresholds: Thresholds) -> Candidates:
        """The candidates of all shards, with one certificate per row."""
        assert isinstance(thresholds.screening, CollectiveScreening)
        self._screened = False
        with self._in_step():
            found = self._step.rescore(thresholds.screening.agreed)
        assert found is not None
        return found

    def close(self) -> None:
        """Sends the servers home and leaves the group. Closing twice is harmless."""
        if self._failed is None:
            with self._in_step():
                self._announce(EndAnnouncement())
            self._failed = CollectiveError("this head has been closed")
        self._collective.close()

    def _take_news(self) -> tuple[Deltas, ...]:
        news, self._news = tuple(self._news), []
        return news

    def _announce(self, announcement: Announcement) -> None:
        self._collective.broadcast(encode_announcement(announcement))

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
    ids = np.sort(np.concatenate([shard.ids for shard in shards]))
    if not np.array_equal(ids, np.arange(sizes[0])):
        raise ValueError("shards of a head own every token of the vocabulary once")
