"""A step's plan as flat arrays for the body: packed tokens, slots and block tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.engine.several_steps.ahead import UNKNOWN
from lexshard.actors.engine.step_plan import StepPlan
from lexshard.actors.kv_cache import BLOCK_TOKENS


def build_batch(plan: StepPlan, drawn: torch.Tensor | None = None) -> Batch:
    """Pack a plan's chunks one after the other; ``drawn`` is what all of them compute where no
    sequence has these tokens yet.

    Output rows, chunk by chunk: the rows that score prompt tokens, then the rows that draw.
    """
    if all(chunk.count == chunk.draws == 1 for chunk in plan.chunks):
        return _of_last_tokens(plan, drawn)
    total = plan.tokens
    token_ids = np.empty(total, dtype=np.int32)
    positions = np.empty(total, dtype=np.int32)
    row_sequence = np.empty(total, dtype=np.int32)
    tables = block_tables(plan)
    output_rows: list[int] = []
    start = 0
    for index, chunk in enumerate(plan.chunks):
        sequence, stop = chunk.sequence, start + chunk.count
        own = sequence.token_ids[chunk.start : chunk.start + chunk.count]
        token_ids[start:stop] = [*own, *chunk.drafted] if chunk.drafted else own
        positions[start:stop] = np.arange(chunk.start, chunk.start + chunk.count)
        row_sequence[start:stop] = index
        ahead = start - chunk.start
        output_rows.extend(range(chunk.scored.start + ahead, chunk.scored.stop + ahead))
        # These predict no prompt tokens, so none is among the scored.
        output_rows.extend(range(stop - chunk.draws, stop))
        start = stop
    slots = (
        tables[row_sequence, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        + positions % BLOCK_TOKENS
    )
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        row_sequence=row_sequence,
        block_tables=tables,
        output_rows=np.asarray(output_rows, dtype=np.int32),
    )


def _of_last_tokens(plan: StepPlan, drawn: torch.Tensor | None) -> Batch:
    """Where every sequence computes its last token and draws, as most steps do: what is built in
    lists is read from fewer places."""
    token_ids, positions, slots = [], [], []
    for chunk in plan.chunks:
        sequence, position = chunk.sequence, chunk.start
        block, place = divmod(position, BLOCK_TOKENS)
        token_ids.append(UNKNOWN if drawn is not None else sequence.token_ids[position])
        positions.append(position)
        slots.append(sequence.blocks[block] * BLOCK_TOKENS + place)
    rows = np.arange(len(positions), dtype=np.int32)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int64),
        row_sequence=rows,
        block_tables=block_tables(plan),
        output_rows=rows,
        drawn=drawn,
    )


def block_tables(plan: StepPlan) -> npt.NDArray[np.int32]:
    """The blocks of each chunk's sequence [C, most]."""
    widest = max(len(chunk.sequence.blocks) for chunk in plan.chunks)
    tables = np.zeros((len(plan.chunks), widest), dtype=np.int32)
    for row, chunk in enumerate(plan.chunks):
        tables[row, : len(chunk.sequence.blocks)] = chunk.sequence.blocks
    return tables
