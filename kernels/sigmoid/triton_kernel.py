"""Verification with sigmoids in Triton: one launch, the vocabulary split across programs.

A draft is tested with two logits, so every program of a sequence finds the first rejection by
itself and goes straight to its part of that row. The last to finish takes the best of all parts.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from lexshard.kernels.noise.triton_kernel import gumbel_of
from lexshard.kernels.verify.checks import refuse_no_bonus
from lexshard.kernels.verify.triton_kernel import acceptance_of
from lexshard.kernels.verify.types import DenseProposals, DraftedRows, Verdict

TILE = 1024  # tokens that a program reads at a time
SPLITS = 64  # programs that share a row: noise is drawn for every token of it

_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _weight(logits, place, inside, scale, alpha, beta):  # type: ignore[no-untyped-def]
    values = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float64)
    return 1.0 / (1.0 + tl.exp(-(values * scale - alpha) / (beta - alpha)))


@triton.jit
def _log(weight):  # type: ignore[no-untyped-def]
    positive = weight > 0.0
    return tl.where(positive, tl.log(tl.where(positive, weight, 1.0)), float("-inf"))


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    logits,
    proposed,
    integers,
    scales,
    drafts,
    scores,
    candidates,
    counts,
    accepted,
    tokens,
    size,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """``integers`` [N, 5] int64: key (low, high), position, first row, rows; ``scales`` [N, 4]
    float64: of target and proposal, alpha, beta. Buffers: ``scores`` float64 and ``candidates``
    int32 [N, 2, SPLITS] (by the residual and by the target alone), ``counts`` [N] all 0."""
    part = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    key_low = tl.load(integers + sequence * 5)
    key_high = tl.load(integers + sequence * 5 + 1)
    position = tl.load(integers + sequence * 5 + 2)
    first = tl.load(integers + sequence * 5 + 3)
    drafted = tl.load(integers + sequence * 5 + 4) - 1
    scale = tl.load(scales + sequence * 4)
    proposed_scale = tl.load(scales + sequence * 4 + 1)
    alpha = tl.load(scales + sequence * 4 + 2)
    beta = tl.load(scales + sequence * 4 + 3)

    # 1. How many drafts stand.
    standing = 1
    emitted = tl.full((), 0, tl.int64)
    for index in range(drafted):
        draft_index = first - sequence + index
        draft = tl.load(drafts + draft_index)
        known = (draft >= 0) & (draft < size)
        p = _weight(logits + (first + index) * size, draft, known, scale, alpha, beta)
        q = _weight(proposed + draft_index * size, draft, known, proposed_scale, alpha, beta)
        uniform, _, _ = acceptance_of(key_low, key_high, position + index)
        standing = standing & (known & (tl.log(uniform) < _log(p) - _log(q))).to(tl.int32)
        emitted += standing

    # 2. The best token of this part of the next row.
    rejected = emitted < drafted
    own_position = position + emitted
    _, residual_low, residual_high = acceptance_of(key_low, key_high, own_position)
    own_low = tl.where(rejected, residual_low, key_low)
    own_high = tl.where(rejected, residual_high, key_high)
    own = logits + (first + emitted) * size
    proposed_size = tl.where(rejected, size, 0)
    own_proposed = proposed + tl.where(rejected, first - sequence + emitted, 0) * size
    best = tl.full((2,), float("-inf"), tl.float64)
    token = tl.full((2,), _NO_TOKEN, tl.int32)
    for start in range(part * TILE, size, SPLITS * TILE):
        place = start + tl.arange(0, TILE)
        inside = place < size
        p = _weight(own, place, inside, scale, alpha, beta)
        q = _weight(own_proposed, place, place < proposed_size, proposed_scale, alpha, beta)
        noise = gumbel_of(place, own_low, own_high, own_position).to(tl.float64)
        left = tl.where(tl.arange(0, 2)[:, None] == 0, (p - q)[None, :], p[None, :])
        score = _log(left) + noise[None, :]
        highest = tl.max(score, 1)
        lowest = tl.min(tl.where(score == highest[:, None], place[None, :], _NO_TOKEN), 1)
        better = highest > best  # a later tile has higher ids
        token = tl.where(better, lowest, token)
        best = tl.where(better, highest, best)
    where = (sequence * 2 + tl.arange(0, 2)) * SPLITS + part
    tl.store(scores + where, best)
    tl.store(candidates + where, token)
    tl.debug_barrier()
    if tl.atomic_add(counts + sequence, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
        return
    tl.debug_barrier()

    # 3. The best of all parts.
    parts = (sequence * 2 + tl.arange(0, 2)[:, None]) * SPLITS + tl.arange(0, SPLITS)[None, :]
    score = tl.load(scores + parts, cache_modifier=".cg")
    candidate = tl.load(candidates + parts, cache_modifier=".cg")
    highest = tl.max(score, 1)
    winner = tl.min(tl.where(score == highest[:, None], candidate, _NO_TOKEN), 1)
    side = tl.arange(0, 2)
    of_residual = tl.min(tl.where(side == 0, winner, _NO_TOKEN))
    of_target = tl.min(tl.where(side == 1, winner, _NO_TOKEN))
    chosen = tl.where(of_residual != _NO_TOKEN, of_residual, of_target)
    chosen = tl.where(chosen == _NO_TOKEN, -1, chosen)
    for index in range(emitted):
        tl.store(tokens + first + index, tl.load(drafts + first - sequence + index))
    tl.store(tokens + first + emitted, chosen.to(tl.int64))
    tl.store(accepted + sequence, emitted)


def verify_by_sigmoid(
    logits: torch.Tensor, rows: DraftedRows, proposals: DenseProposals, alpha: float, beta: float
) -> Verdict:
    """Tensors of one device. Raises ValueError for greedy rows, which have nothing to approximate:
    verify those with `kernels.verify.verify`."""
    if not rows.inverse_temperature.all():
        raise ValueError("rows of temperature 0 have no sigmoids; verify them in mode greedy")
    refuse_no_bonus(rows)
    device = logits.device
    count, size = logits.shape
    sequences = len(rows.offsets) - 1
    integers = np.stack(
        [
            (rows.key & np.uint64(0xFFFFFFFF)).astype(np.int64),
            (rows.key >> np.uint64(32)).astype(np.int64),
            rows.position.astype(np.int64),
            rows.offsets[:-1],
            np.diff(rows.offsets),
        ],
        axis=1,
    )
    scales = np.stack(
        [
            rows.inverse_temperature,
            proposals.inverse_temperature,
            np.full(sequences, alpha),
            np.full(sequences, beta),
        ],
        axis=1,
    )
    drafts = rows.drafts if isinstance(rows.drafts, torch.Tensor) else torch.from_numpy(rows.drafts)
    splits = min(SPLITS, triton.next_power_of_2(triton.cdiv(size, TILE)))
    accepted = torch.empty(sequences, dtype=torch.int64, device=device)
    tokens = torch.full((count,), -1, dtype=torch.int64, device=device)
    _kernel[(splits, sequences)](
        logits,
        proposals.logits,
        torch.from_numpy(integers).to(device, non_blocking=True),
        torch.from_numpy(scales).to(device, non_blocking=True),
        drafts.to(device, non_blocking=True),
        torch.empty(sequences, 2, splits, dtype=torch.float64, device=device),
        torch.empty(sequences, 2, splits, dtype=torch.int32, device=device),
        torch.zeros(sequences, dtype=torch.int32, device=device),
        accepted,
        tokens,
        size,
        SPLITS=splits,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return Verdict(accepted, tokens)
