"""Verification in Triton: one launch for a batch, every row split across programs.

Each program reads its part of one row once, for the largest of every 64 logits and (``exact``) an
online softmax of target and proposal in float64. The last program to finish a row puts the parts
together and decides it; the last to finish a sequence finds its first rejection and draws the token
after it. Who is last is counted, nobody waits: so programs may run in any order, even one by one.
Drawing opens blocks of 64 tokens, best bound first, until no bound is above the best score.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from lexshard.kernels.blocks import BLOCK, blocks_of
from lexshard.kernels.noise.triton_kernel import philox
from lexshard.kernels.verify.checks import refuse_no_bonus
from lexshard.kernels.verify.cpu import COUPLED, EXACT, GREEDY, MODES
from lexshard.kernels.verify.race import CERTAIN, DENSE, NOWHERE, SPARSE
from lexshard.kernels.verify.reference import ACCEPTANCE_LANE
from lexshard.kernels.verify.triton_race import (
    distance,
    greedy_token,
    race,
    scaled_logits,
    sparse_probabilities,
)
from lexshard.kernels.verify.types import (
    DenseProposals,
    DraftedRows,
    Proposals,
    SparseProposals,
    Verdict,
)

TILE_BLOCKS = 32  # blocks of 64 tokens that a program reads at a time
SPLITS = 16  # parts of a row: a batch of few rows should still fill a GPU

_EXACT, _COUPLED, _GREEDY = (tl.constexpr(each) for each in (EXACT, COUPLED, GREEDY))
_NOWHERE = tl.constexpr(NOWHERE)
_SPARSE, _DENSE = tl.constexpr(SPARSE), tl.constexpr(DENSE)
_BLOCK = tl.constexpr(BLOCK)
_LANE = tl.constexpr(ACCEPTANCE_LANE)


@triton.jit
def _add(scaled, top, total):  # type: ignore[no-untyped-def]
    """An online softmax (top, total) with a tile more."""
    highest = tl.maximum(top, tl.max(scaled))
    weights = tl.where(scaled == float("-inf"), 0.0, tl.exp(distance(scaled, highest)))
    return highest, total * tl.exp(distance(top, highest)) + tl.sum(weights)


@triton.jit
def _combined(parts, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(top, log total) of a row from its parts [SPLITS, 2]; an empty one has log total inf."""
    part = tl.arange(0, SPLITS)
    tops = tl.load(parts + part * 2, cache_modifier=".cg")
    totals = tl.load(parts + part * 2 + 1, cache_modifier=".cg")
    top = tl.max(tops)
    total = tl.sum(totals * tl.exp(distance(tops, top)))
    return top, tl.where(total > 0.0, tl.log(total), float("inf"))


@triton.jit
def acceptance_of(key_low, key_high, position):  # type: ignore[no-untyped-def]
    """The uniform of a row and the key of its residual's noise, low and high half."""
    zero = tl.zeros((1,), tl.uint32)
    x0, x1, x2, x3 = philox(
        zero + position.to(tl.uint32),
        zero,
        zero + _LANE,
        zero + key_low.to(tl.uint32),
        zero + key_high.to(tl.uint32),
    )
    mantissa = (x0.to(tl.int64) << 20) | (x1 >> 12).to(tl.int64)
    uniform = (2.0 * mantissa.to(tl.float64) + 1.0) * 1.1102230246251565e-16
    return tl.max(uniform), tl.max(x2.to(tl.int64)), tl.max(x3.to(tl.int64))


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    logits,
    integers,
    scales,
    drafts,
    offsets,
    dense_logits,
    ids,
    probabilities,
    sparse_offsets,
    maxima,
    parts,
    totals,
    stands,
    row_counts,
    sequence_counts,
    accepted,
    tokens,
    size,
    blocks,
    MODE: tl.constexpr,
    KIND: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``integers`` [R, 5] int64: key (low, high), position, sequence, draft or -1; ``scales``
    [R, 2] float64: of target and proposal. The rest are buffers: ``maxima`` [R, blocks] fp32,
    ``parts`` [R, 2, SPLITS, 2] and ``totals`` [R, 4] float64, ``stands`` [R] int32, counts all 0.
    Conditions on constants stand alone, so that nothing is compiled where they do not hold."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    sequence = tl.load(integers + row * 5 + 3)
    draft_index = tl.load(integers + row * 5 + 4)
    scale = tl.load(scales + row * 2)
    if MODE == _GREEDY:
        scale = scale * 0.0
    tested = (draft_index >= 0) & (scale > 0.0)
    own_logits = logits + row * size
    own_maxima = maxima + row * blocks
    own_parts = parts + row * (4 * SPLITS)
    dense_scale = tl.load(scales + row * 2 + 1)
    own_dense = dense_logits + tl.maximum(draft_index, 0) * size

    # 1. This program's part of the row.
    top = tl.full((), float("-inf"), tl.float64)
    total = tl.full((), 0.0, tl.float64)
    dense_top = tl.full((), float("-inf"), tl.float64)
    dense_total = tl.full((), 0.0, tl.float64)
    for start in range(part * TILE_BLOCKS, blocks, SPLITS * TILE_BLOCKS):
        block = start + tl.arange(0, TILE_BLOCKS)
        place = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        inside = place < size
        values = tl.load(own_logits + place, mask=inside, other=float("-inf"))
        tl.store(own_maxima + block, tl.max(values, 1), mask=block < blocks)
        if MODE == _EXACT:  # noqa: SIM102
            if tested:
                top, total = _add(values.to(tl.float64) * scale, top, total)
                if KIND == _DENSE:
                    proposed = scaled_logits(own_dense, place, inside, dense_scale)
                    dense_top, dense_total = _add(proposed, dense_top, dense_total)
    if MODE == _EXACT:
        tl.store(own_parts + part * 2, top)
        tl.store(own_parts + part * 2 + 1, total)
        tl.store(own_parts + (SPLITS + part) * 2, dense_top)
        tl.store(own_parts + (SPLITS + part) * 2 + 1, dense_total)
    tl.debug_barrier()
    if tl.atomic_add(row_counts + row, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
        return
    tl.debug_barrier()

    # 2. The row: does its draft stand? Rows that are not tested draw their token here.
    key_low = tl.load(integers + row * 5)
    key_high = tl.load(integers + row * 5 + 1)
    position = tl.load(integers + row * 5 + 2)
    draft = tl.load(drafts + draft_index, mask=draft_index >= 0, other=-1)
    zero = tl.full((), 0.0, tl.float64)
    none = tl.full((), 0, tl.int64)
    if MODE == _EXACT:  # noqa: SIM102
        if tested:
            top, log_total = _combined(own_parts, SPLITS)
            log_q = zero
            dense_log_total = zero
            known = (draft >= 0) & (draft < size)
            if KIND == _DENSE:
                dense_top, dense_log_total = _combined(own_parts + 2 * SPLITS, SPLITS)
                log_q = scaled_logits(own_dense, draft, known, dense_scale)
                log_q = distance(log_q, dense_top) - dense_log_total
            if KIND == _SPARSE:
                first = tl.load(sparse_offsets + draft_index)
                stop = tl.load(sparse_offsets + draft_index + 1)
                wanted = tl.zeros((1,), tl.int64) + draft
                q = tl.max(sparse_probabilities(ids, probabilities, first, stop, wanted, 1))
                log_q = tl.where(q > 0.0, tl.log(tl.where(q > 0.0, q, 1.0)), float("-inf"))
            log_p = distance(scaled_logits(own_logits, draft, known, scale), top) - log_total
            uniform, _, _ = acceptance_of(key_low, key_high, position)
            stand = known & (tl.log(uniform) < log_p - log_q)
            tl.store(stands + row, stand.to(tl.int32))
            tl.store(totals + row * 4, top)
            tl.store(totals + row * 4 + 1, log_total)
            tl.store(totals + row * 4 + 2, dense_top)
            tl.store(totals + row * 4 + 3, dense_log_total)
    if (MODE != _EXACT) | (scale == 0.0):
        token = greedy_token(own_logits, own_maxima, size, blocks, BLOCKS)
        if MODE == _COUPLED:  # noqa: SIM102
            if scale > 0.0:
                token = race(
                    own_logits,
                    own_maxima,
                    size,
                    blocks,
                    scale,
                    key_low,
                    key_high,
                    position,
                    False,
                    zero,
                    zero,
                    draft,
                    own_dense,
                    zero,
                    zero,
                    zero,
                    ids,
                    probabilities,
                    none,
                    none,
                    KIND=_NOWHERE,
                    BLOCKS=BLOCKS,
                )
        tl.store(stands + row, ((token == draft) & (draft_index >= 0)).to(tl.int32))
        tl.store(totals + row * 4, token.to(tl.float64))
    tl.debug_barrier()
    begin = tl.load(offsets + sequence)
    count = tl.load(offsets + sequence + 1) - begin
    arrived = tl.atomic_add(sequence_counts + sequence, 1, sem="acq_rel", scope="gpu")
    if arrived != count - 1:
        return
    tl.debug_barrier()

    # 3. The sequence: what stands, and the token after it.
    standing = tl.full((), 1, tl.int32)
    emitted = tl.full((), 0, tl.int64)
    for index in range(count - 1):
        other = begin + index
        standing = standing & tl.load(stands + other, cache_modifier=".cg")
        token_of_draft = tl.load(drafts + tl.load(integers + other * 5 + 4))
        tl.store(tokens + other, token_of_draft, mask=standing > 0)
        emitted += standing
    tl.store(accepted + sequence, emitted)
    last = begin + emitted
    if MODE != _EXACT or scale == 0.0:
        last_token = tl.load(totals + last * 4, cache_modifier=".cg").to(tl.int32)
    else:
        last_position = tl.load(integers + last * 5 + 2)
        last_index = tl.load(integers + last * 5 + 4)
        rejected = last_index >= 0
        first = none
        stop = none
        if KIND == _SPARSE:
            first = tl.load(sparse_offsets + last_index, mask=rejected, other=0)
            stop = tl.load(sparse_offsets + last_index + 1, mask=rejected, other=0)
        _, residual_low, residual_high = acceptance_of(key_low, key_high, last_position)
        last_token = race(
            logits + last * size,
            maxima + last * blocks,
            size,
            blocks,
            scale,
            tl.where(rejected, residual_low, key_low),
            tl.where(rejected, residual_high, key_high),
            last_position,
            rejected,
            tl.load(totals + last * 4, mask=rejected, other=0.0, cache_modifier=".cg"),
            tl.load(totals + last * 4 + 1, mask=rejected, other=0.0, cache_modifier=".cg"),
            tl.load(drafts + last_index, mask=rejected, other=-1),
            dense_logits + tl.maximum(last_index, 0) * size,
            tl.load(scales + last * 2 + 1),
            tl.load(totals + last * 4 + 2, mask=rejected, other=0.0, cache_modifier=".cg"),
            tl.load(totals + last * 4 + 3, mask=rejected, other=0.0, cache_modifier=".cg"),
            ids,
            probabilities,
            first,
            stop,
            KIND=KIND,
            BLOCKS=BLOCKS,
        )
    tl.store(tokens + last, last_token.to(tl.int64))


def _row_table(rows: DraftedRows, proposals: Proposals) -> tuple[torch.Tensor, torch.Tensor]:
    """``integers`` and ``scales`` of the kernel, on the host."""
    counts = np.diff(rows.offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    row = np.arange(int(rows.offsets[-1]))
    key = rows.key[owner]
    is_last = row == rows.offsets[owner + 1] - 1
    integers = np.stack(
        [
            (key & np.uint64(0xFFFFFFFF)).astype(np.int64),
            (key >> np.uint64(32)).astype(np.int64),
            rows.position[owner].astype(np.int64) + row - rows.offsets[owner],
            owner,
            np.where(is_last, -1, row - owner),
        ],
        axis=1,
    )
    proposed = rows.inverse_temperature
    if isinstance(proposals, DenseProposals):
        proposed = proposals.inverse_temperature
    scales = np.stack([rows.inverse_temperature[owner], proposed[owner]], axis=1)
    return torch.from_numpy(integers), torch.from_numpy(scales)


def verify(logits: torch.Tensor, rows: DraftedRows, mode: str, proposals: Proposals) -> Verdict:
    """``logits`` and dense proposals are tensors of one device; so are the results."""
    refuse_no_bonus(rows)
    device = logits.device

    def place(array: np.ndarray | torch.Tensor) -> torch.Tensor:
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return tensor.to(device, non_blocking=True)

    count, size = logits.shape
    sequences = len(rows.offsets) - 1
    blocks = blocks_of(size)
    integers, scales = _row_table(rows, proposals)
    kind, dense = CERTAIN, logits
    ids = probabilities = sparse_offsets = integers
    if isinstance(proposals, DenseProposals):
        kind, dense = DENSE, proposals.logits
    elif isinstance(proposals, SparseProposals):
        kind = SPARSE
        ids = torch.from_numpy(proposals.ids)
        probabilities = torch.from_numpy(proposals.probabilities)
        sparse_offsets = torch.from_numpy(proposals.offsets)
    splits = min(SPLITS, triton.next_power_of_2(triton.cdiv(blocks, TILE_BLOCKS)))
    counts = torch.zeros(count + sequences, dtype=torch.int32, device=device)
    accepted = torch.empty(sequences, dtype=torch.int64, device=device)
    tokens = torch.full((count,), -1, dtype=torch.int64, device=device)
    block_count = triton.next_power_of_2(blocks)
    _kernel[(splits, count)](
        logits,
        place(integers),
        place(scales),
        place(rows.drafts),
        place(rows.offsets),
        dense,
        place(ids),
        place(probabilities),
        place(sparse_offsets),
        torch.empty(count, blocks, dtype=torch.float32, device=device),
        torch.empty(count, 2, splits, 2, dtype=torch.float64, device=device),
        torch.empty(count, 4, dtype=torch.float64, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        counts,
        counts[count:],
        accepted,
        tokens,
        size,
        blocks,
        MODE=MODES[mode],
        KIND=kind,
        SPLITS=splits,
        TILE_BLOCKS=TILE_BLOCKS,
        BLOCKS=block_count,
        num_warps=8 if block_count > 1024 else 4,
        enable_fp_fusion=False,
    )
    return Verdict(accepted, tokens)
