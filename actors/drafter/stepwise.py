"""Drafting with a model of any family and any head, step by step: as right as the native call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lexshard.actors.body.batch import Batch, Body
from lexshard.actors.drafter.draft_cache import DraftCache, Turn, block_tables
from lexshard.actors.drafter.step_heads import Contest, StepHead
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.proposal import Proposal
from lexshard.kernels.draw import Controls, draw
from lexshard.kernels.truncate import truncate


class StepwiseDrafter:
    """As `actors.drafter.model.ModelDrafter`, for bodies that are not fused, for GPUs, and for
    heads that the native call has not: every step goes through the body's ``forward`` and ``head``.
    """

    name = "model"

    def __init__(self, body: Body, head: StepHead, *, blocks: int) -> None:
        self._body = body
        self._head = head
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
            if active:
                tasks = [turn.task for turn in active]
                contest = self._head.contest(hidden[drawing], tasks, ends)
                for row, (turn, token) in enumerate(
                    zip(active, _draw(tasks, contest, ends), strict=True)
                ):
                    proposed[turn.index].append(token)
                    if turn.task.propose:
                        drawn_from[turn.index].append(_proposal(turn.task, contest, row))
            more = [row for row, turn in enumerate(active) if len(proposed[turn.index]) < turn.most]
            active = [active[row] for row in more]
            starts = [ends[row] for row in more]
            put_in = [proposed[turn.index][-1:] for turn in active]
        for turn in turns:
            turn.finish(proposed[turn.index])
        reads = map(self._cache.behind.__contains__, range(len(proposed)))
        return [Draft(*each) for each in zip(proposed, drawn_from, reads, strict=True)]

    def forget(self, sequence: int) -> None:
        """See `actors.drafter.protocol.Drafter`."""
        self._cache.forget(sequence)


def _draw(tasks: Sequence[DraftTask], contest: Contest, positions: Sequence[int]) -> list[int]:
    """A token for each row of ``contest`` at its position, as the target would draw it."""
    controls = Controls(
        inverse_temperature=np.array([task.inverse_temperature for task in tasks]),
        top_k=np.array([task.top_k for task in tasks], np.int64),
        top_p=np.where(contest.truncated, 1.0, [task.top_p for task in tasks]),
        log_min_p=np.array([task.log_min_p for task in tasks], np.float64),
        key=np.array([task.key for task in tasks], np.uint64),
        position=np.array(positions, np.uint64),
    )
    return draw(contest.ids, contest.logits, contest.offsets, controls).tolist()


def _proposal(task: DraftTask, contest: Contest, row: int) -> Proposal:
    own = slice(contest.offsets[row], contest.offsets[row + 1])
    logits = contest.logits[own]
    if task.truncates:
        keep = truncate(
            logits,
            inverse_temperature=task.inverse_temperature,
            top_k=task.top_k,
            top_p=task.top_p,
            min_p=task.min_p,
        )
        logits = np.where(keep, logits, np.float32(-np.inf))
    return Proposal(contest.ids[own], logits, task.inverse_temperature)


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
