"""A step's plan as flat arrays for the body: packed tokens, slots and block tables."""

from __future__ import annotations

import numpy as np

from lexshard.actors.body.batch import Batch
from lexshard.actors.engine.scheduler import StepPlan
from lexshard.actors.kv_cache import BLOCK_TOKENS


def build_batch(plan: StepPlan) -> Batch:
    """Pack a plan's chunks one after the other.

    Output rows, chunk by chunk: the rows that score prompt tokens, then the rows that draw.
    """
    total = plan.tokens
    widest = max(len(chunk.sequence.blocks) for chunk in plan.chunks)
    token_ids = np.empty(total, dtype=np.int32)
    positions = np.empty(total, dtype=np.int32)
    row_sequence = np.empty(total, dtype=np.int32)
    block_tables = np.zeros((len(plan.chunks), widest), dtype=np.int32)
    output_rows: list[int] = []
    start = 0
    for index, chunk in enumerate(plan.chunks):
        sequence, stop = chunk.sequence, start + chunk.count
        if chunk.count == 1:
            token_ids[start] = sequence.token_ids[chunk.start]
            positions[start] = chunk.start
            row_sequence[start] = index
        else:
            own = sequence.token_ids[chunk.start : chunk.start + chunk.count]
            token_ids[start:stop] = [*own, *chunk.drafted] if chunk.drafted else own
            positions[start:stop] = np.arange(chunk.start, chunk.start + chunk.count)
            row_sequence[start:stop] = index
        block_tables[index, : len(sequence.blocks)] = sequence.blocks
        ahead = start - chunk.start
        output_rows.extend(range(chunk.scored.start + ahead, chunk.scored.stop + ahead))
        # These predict no prompt tokens, so none is among the scored.
        output_rows.extend(range(stop - chunk.draws, stop))
        start = stop
    slots = (
        block_tables[row_sequence, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        + positions % BLOCK_TOKENS
    )
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        row_sequence=row_sequence,
        block_tables=block_tables,
        output_rows=np.asarray(output_rows, dtype=np.int32),
    )
