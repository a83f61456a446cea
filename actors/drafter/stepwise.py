"""Drafting with a model of any family, step by step: slower than the native call, and as right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from actors.body.batch import Batch, Body
from actors.body.head_weights import HeadWeights
from actors.drafter.draft_cache import DraftCache, Turn, block_tables
from actors.drafter.task import Draft, DraftTask
from actors.kv_cache import BLOCK_TOKENS
from actors.proposal import Proposal
from kernels.draw import Controls, draw


class StepwiseDrafter:
    """As `actors.drafter.model.ModelDrafter`, for bodies that are not fused and for GPUs: every
    step goes through the body's ``forward`` and looks at the whole head.

    Raises ValueError where the body lacks tokens of the target.
    """

    name = "model"

    def __init__(self, body: Body, head: HeadWeights, *, blocks: int, vocabulary_size: int) -> None:
        if min(body.vocabulary_size, len(head.weight)) < vocabulary_size:
            raise ValueError(
                f"the draft model has {len(head.weight)} of {vocabulary_size} tokens: use one "
                "that was made for the target's tokenizer"
            )
        self._body = body
        self._head = head
        self._ids = np.arange(vocabulary_size, dtype=np.int32)
        self._cache = DraftCache(blocks, body.max_positions)
        body.allocate_cache(blocks)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """See `actors.drafter.protocol.Drafter`."""
        proposed: list[list[int]] = [[] for _ in tasks]
        drawn_from: list[list[Proposal]] = [[] for _ in tasks]
        turns = self._cache.turns(tasks)
        put_in = [turn.tokens for turn in turns]
        starts = [turn.start for turn in turns]
        active = turns
        while active:
            hidden = self._body.forward(_batch(active, put_in, starts))
            drawing = [row for row, turn in enumerate(active) if turn.most > 0]
            active = [active[row] for row in drawing]
            ends = [starts[row] + len(put_in[row]) for row in drawing]
            logits = self._logits(hidden[drawing])
            drawn = self._draw(active, logits, ends)
            for turn, token, row in zip(active, drawn, logits, strict=True):
                proposed[turn.index].append(token)
                if turn.task.propose:
                    drawn_from[turn.index].append(
                        Proposal(self._ids, row, turn.task.inverse_temperature)
                    )
            more = [row for row, turn in enumerate(active) if len(proposed[turn.index]) < turn.most]
            active = [active[row] for row in more]
            starts = [ends[row] for row in more]
            put_in = [proposed[turn.index][-1:] for turn in active]
        for turn in turns:
            turn.finish(proposed[turn.index])
        return [Draft(*each) for each in zip(proposed, drawn_from, strict=True)]

    def forget(self, sequence: int) -> None:
        """See `actors.drafter.protocol.Drafter`."""
        self._cache.forget(sequence)

    def _logits(self, hidden: torch.Tensor) -> npt.NDArray[np.float32]:
        """Of every token of the target [N, V]."""
        return self._head.logits(hidden)[:, : len(self._ids)].cpu().numpy()

    def _draw(
        self, turns: list[Turn], logits: npt.NDArray[np.float32], positions: list[int]
    ) -> list[int]:
        """A token for each row of ``logits`` at its position, as the target would draw it."""
        if not turns:
            return []
        rows, size = logits.shape
        controls = Controls(
            inverse_temperature=np.array([turn.task.inverse_temperature for turn in turns]),
            top_k=np.zeros(rows, np.int64),
            top_p=np.ones(rows),
            log_min_p=np.full(rows, -np.inf),
            key=np.array([turn.task.key for turn in turns], np.uint64),
            position=np.array(positions, np.uint64),
        )
        offsets = np.arange(rows + 1, dtype=np.int64) * size
        return draw(np.tile(self._ids, rows), logits.ravel(), offsets, controls).tolist()


def _batch(turns: list[Turn], tokens: list[list[int]], starts: list[int]) -> Batch:
    """One step that puts ``tokens`` in at ``starts`` and wants each sequence's last row."""
    counts = [len(each) for each in tokens]
    positions = np.concatenate(
        [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    ).astype(np.int32)
    row_sequence = np.repeat(np.arange(len(turns), dtype=np.int32), counts)
    tables = block_tables(turns)
    blocks = tables[row_sequence, positions // BLOCK_TOKENS].astype(np.int64)
    return Batch(
        token_ids=np.array([token for each in tokens for token in each], np.int32),
        positions=positions,
        slots=blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
        row_sequence=row_sequence,
        block_tables=tables,
        output_rows=np.cumsum(counts, dtype=np.int32) - np.int32(1),
    )
