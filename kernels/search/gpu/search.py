"""The whole search on a device: fixed buffers, fixed launches, nothing the host waits for.

From estimates to the canonical products of every token that can still matter, in one sequence of
launches that a CUDA graph can hold:

1. estimates are post-processed and adjusted in place, and the error of each row is widened by what
   those operations can cost;
2. per block of 64 ids: a bound on every score, and what the best estimate promises;
3. the leaders (at most `Workspace.leaders.shape[1]` a row) and their canonical products;
4. from these a threshold that the answer certainly reaches;
5. every id whose upper bound reaches it, sorted, and its canonical product.

A row with more candidates than there is room for is marked by its count; nothing of it is usable.
On a GPU logarithms and hyperbolic tangents may differ from the host's in their last float64 bit:
thresholds and bounds keep a distance that covers it, and products need neither. So what follows on
the host from the canonical products is what would follow without a GPU, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from kernels.blocks import blocks_of
from kernels.penalties import Adjustments
from kernels.rounding import INFLATION
from kernels.rows.triton_kernel import gather_logits
from kernels.screen import Screened
from kernels.search import Needs
from kernels.search.gpu import triton_adjust as adjusting
from kernels.search.gpu import triton_kernel as kernel
from kernels.search.gpu.triton_adjust import ENTRY, REALS, TILE
from kernels.search.gpu.triton_kernel import IDLE, INTEGERS

ADJUSTING_PROGRAMS = 64
COLUMNS = 1024  # of a hidden state at a time
NOTHING_SEEN = np.zeros(0, np.int32)

__all__ = [
    "IDLE",
    "PackedSupport",
    "PostProcessing",
    "Questions",
    "Support",
    "Tokens",
    "Workspace",
    "allocate",
    "pack_questions",
    "pack_support",
    "post_processing",
    "search",
    "unpack_results",
]


@dataclass(frozen=True, slots=True, eq=False)
class PostProcessing:
    """What `kernels.rows.postprocess` does, with all that its roundings depend on."""

    bias: torch.Tensor | None  # [V] fp32
    scale: float
    softcap: float | None
    constants: torch.Tensor  # [5] float64: largest size and bias, |scale|, cap, scale


class Questions(NamedTuple):
    """What the rows ask, as `kernels.search.gpu.triton_kernel` reads it; IDLE rows ask nothing."""

    integers: torch.Tensor  # [N, 5] int64: kind, k, low and high half of the key, position
    reals: torch.Tensor  # [N, 4] float64: inverse temperature, ln min_p, slope, size


class Tokens(NamedTuple):
    """Which tokens of the vocabulary the rows are, by whose ids their noise is drawn."""

    ids: torch.Tensor | None  # [V] int32 ascending; None where row i is token i
    by_block: bool = True  # every 64 rows are a block of the vocabulary


class Support(NamedTuple):
    """The tokens whose logits are adjusted: row ``r`` owns ``offsets[r]:offsets[r + 1]``."""

    offsets: torch.Tensor  # [N + 1] int64
    entries: torch.Tensor  # [S, 6] int32: row, id (sorted within a row), four fp32 terms


EVERY_TOKEN = Tokens(None)


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The buffers of one search of N rows over V ids; the last five are its result."""

    factors: torch.Tensor  # [N, 3] fp32
    tops: torch.Tensor  # [N, blocks] fp32
    ceilings: torch.Tensor  # [N, blocks] float64
    promises: torch.Tensor  # [N, blocks] fp32
    chosen: torch.Tensor  # [N, L] int32
    chosen_counts: torch.Tensor  # [N] int32
    leaders: torch.Tensor  # [N, L] int32
    leader_counts: torch.Tensor  # [N] int32
    leader_logits: torch.Tensor  # [N, L] fp32
    thresholds: torch.Tensor  # [N] float64
    tile_counts: torch.Tensor  # [N, tiles] int32
    results: torch.Tensor  # [N (3 + 2 C)] int32, the memory of all that follows
    largest: torch.Tensor  # [N] fp32, the largest upper bound of a logit
    finite: torch.Tensor  # [N] int32, 0 where the hidden state has NaN or infinity
    counts: torch.Tensor  # [N] int32, above C where there was no room for all
    candidates: torch.Tensor  # [N, C] int32
    logits: torch.Tensor  # [N, C] fp32, canonical products before post-processing


def post_processing(
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    largest_size: float,
    device: torch.device | str,
) -> PostProcessing:
    """``bias`` [V] fp32; ``largest_size`` bounds the norms of the rows and of their approximations
    (`kernels.quantize.tiers`)."""
    largest_bias = 0.0 if bias is None or not bias.numel() else float(bias.abs().max())
    constants = [largest_size, largest_bias, abs(scale), softcap or 0.0, scale]
    return PostProcessing(
        None if bias is None else bias.to(device=device, dtype=torch.float32).contiguous(),
        scale,
        softcap,
        torch.tensor(constants, dtype=torch.float64, device=device),
    )


def allocate(
    rows: int, size: int, *, capacity: int, leaders: int, device: torch.device | str
) -> Workspace:
    """Buffers for ``rows`` hidden states over ``size`` ids; ``leaders`` is a power of two.

    The results lie in one piece of memory (`Workspace.results`). Raises ValueError for a number of
    leaders that is not a power of two.
    """
    if leaders & (leaders - 1) or leaders < kernel.FEW:
        raise ValueError(f"{leaders} leaders: take a power of two from {kernel.FEW} on")
    blocks, tiles = blocks_of(size), triton.cdiv(size, TILE)

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    results = zeros(torch.int32, rows * (3 + 2 * capacity))
    largest, finite, counts, candidates, logits = unpack_results(results, rows)
    return Workspace(
        factors=zeros(torch.float32, rows, 3),
        tops=zeros(torch.float32, rows, blocks),
        ceilings=zeros(torch.float64, rows, blocks),
        promises=zeros(torch.float32, rows, blocks),
        chosen=zeros(torch.int32, rows, leaders),
        chosen_counts=zeros(torch.int32, rows),
        leaders=zeros(torch.int32, rows, leaders),
        leader_counts=zeros(torch.int32, rows),
        leader_logits=zeros(torch.float32, rows, leaders),
        thresholds=zeros(torch.float64, rows),
        tile_counts=zeros(torch.int32, rows, tiles),
        results=results,
        largest=largest,
        finite=finite,
        counts=counts,
        candidates=candidates,
        logits=logits,
    )


def unpack_results(
    results: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``largest``, ``finite``, ``counts``, ``candidates`` and ``logits`` of `Workspace.results`."""
    capacity = (results.numel() // rows - 3) // 2
    largest, finite, counts, candidates, logits = results.split(
        [rows, rows, rows, rows * capacity, rows * capacity]
    )
    shape = (rows, capacity)
    return (
        largest.view(torch.float32),
        finite,
        counts,
        candidates.view(shape),
        logits.view(torch.float32).view(shape),
    )


def search(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    screened: Screened,
    post: PostProcessing,
    questions: Questions,
    support: Support,
    workspace: Workspace,
    tokens: Tokens = EVERY_TOKEN,
) -> None:
    """Fills ``workspace``; see the steps above.

    ``hidden`` [N, d] fp32, contiguous; ``weight`` [V, d] fp32 or bf16; ``screened`` their estimates
    [N, W] with ``W >= V``, which are overwritten. All on one device, CUDA or, for
    Triton's interpreter, the CPU.
    """
    rows, columns = hidden.shape
    size, width = weight.shape[0], screened.estimate.shape[1]
    values, row_slack = screened.estimate, screened.row_slack
    leaders, capacity = workspace.leaders.shape[1], workspace.candidates.shape[1]
    blocks, tiles = workspace.ceilings.shape[1], workspace.tile_counts.shape[1]
    post_flags = {
        "BIAS": post.bias is not None,
        "SCALE": post.scale != 1.0,
        "SOFTCAP": post.softcap is not None,
    }
    bias = post.constants if post.bias is None else post.bias
    owned, token_ids = kernel.ALL_TOKENS, questions.integers
    if tokens.ids is not None:
        owned = kernel.WHOLE_BLOCKS if tokens.by_block else kernel.ANY_TOKENS
        token_ids = tokens.ids
    asked = (questions.integers, questions.reals, token_ids)
    bounds = (values, row_slack, workspace.factors, *asked)
    strides = (size, width, row_slack.stride(0))
    grid = (tiles, rows)
    terms = support.entries.view(torch.float32)
    adjusting.factors_kernel[(rows,)](
        hidden,
        screened.hidden_slack,
        questions.reals,
        post.constants,
        workspace.factors,
        workspace.finite,
        columns,
        screened.hidden_slack.shape[1],
        **post_flags,
        COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )
    if any(post_flags.values()):
        adjusting.postprocess_kernel[grid](
            values, bias, post.constants, size, width, **post_flags, enable_fp_fusion=False
        )
    adjusting.adjust_kernel[(ADJUSTING_PROGRAMS,)](
        values,
        support.entries,
        terms,
        support.offsets,
        rows,
        width,
        enable_fp_fusion=False,
    )
    kernel.summary_kernel[grid](
        *bounds,
        workspace.tops,
        workspace.ceilings,
        workspace.promises,
        *strides,
        blocks,
        OWNED=owned,
        enable_fp_fusion=False,
    )
    kernel.select_kernel[(rows,)](
        workspace.tops,
        workspace.promises,
        questions.integers,
        workspace.largest,
        workspace.chosen,
        workspace.chosen_counts,
        blocks,
        BLOCKS=triton.next_power_of_2(blocks),
        LEADERS=leaders,
        num_warps=8,
        enable_fp_fusion=False,
    )
    kernel.leaders_kernel[(rows,)](
        values,
        *asked,
        workspace.chosen,
        workspace.chosen_counts,
        workspace.leaders,
        workspace.leader_counts,
        size,
        width,
        LEADERS=leaders,
        OWNED=owned,
        num_warps=16,
        enable_fp_fusion=False,
    )
    gather_logits(
        hidden, weight, workspace.leaders, workspace.leader_counts, workspace.leader_logits
    )
    kernel.thresholds_kernel[(rows,)](
        workspace.leaders,
        workspace.leader_counts,
        workspace.leader_logits,
        *asked,
        bias,
        post.constants,
        support.entries,
        terms,
        support.offsets,
        workspace.thresholds,
        size,
        **post_flags,
        LEADERS=leaders,
        OWNED=owned,
        enable_fp_fusion=False,
    )
    kernel.count_kernel[grid](
        *bounds,
        workspace.thresholds,
        workspace.ceilings,
        workspace.tile_counts,
        *strides,
        blocks,
        tiles,
        OWNED=owned,
        enable_fp_fusion=False,
    )
    kernel.collect_kernel[grid](
        *bounds,
        workspace.thresholds,
        workspace.tile_counts,
        workspace.candidates,
        workspace.counts,
        *strides,
        tiles,
        capacity,
        TILES=triton.next_power_of_2(tiles),
        OWNED=owned,
        enable_fp_fusion=False,
    )
    gather_logits(hidden, weight, workspace.candidates, workspace.counts, workspace.logits)


def pack_questions(needs: Needs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """`Questions.integers` and ``reals`` of ``needs``, without adjustments."""
    integers = np.empty((len(needs.kind), INTEGERS), np.int64)
    integers[:, 0] = needs.kind
    integers[:, 1] = needs.k
    integers[:, 2] = (needs.key & np.uint64(0xFFFFFFFF)).astype(np.int64)
    integers[:, 3] = (needs.key >> np.uint64(32)).astype(np.int64)
    integers[:, 4] = needs.position.astype(np.int64)
    reals = np.empty((len(needs.kind), REALS), np.float64)
    reals[:, 0] = needs.inverse_temperature
    reals[:, 1] = needs.log_min_p
    reals[:, 2] = 1.0
    reals[:, 3] = 0.0
    return integers, reals


class PackedSupport(NamedTuple):
    """`Support` on the host, and what adjusting does to errors: per row the largest slope, and
    how much the largest adjustment can add (`Questions.reals`)."""

    offsets: npt.NDArray[np.int64]  # [N + 1]
    entries: npt.NDArray[np.int32]  # [S, 6]
    slope: npt.NDArray[np.float64]  # [N]
    size: npt.NDArray[np.float64]  # [N]


def pack_support(adjustments: Adjustments, vocabulary_size: int) -> PackedSupport:
    """The adjusted tokens of N rows below ``vocabulary_size``. Rows restricted to allowed ids are
    not for the search: raises ValueError."""
    a = adjustments
    rows = len(a.active)
    slope, size = np.ones(rows), np.zeros(rows)
    entries = [np.empty((0, ENTRY), np.int32)]
    counts = np.zeros(rows, np.int64)
    for row in np.flatnonzero(a.active).tolist():
        if a.restricted[row]:
            raise ValueError(f"row {row} is restricted to allowed ids: search among those alone")
        ids, terms = _row_support(a, row, vocabulary_size)
        with np.errstate(divide="ignore"):
            steepest = float(np.maximum(terms[:, 1], 1.0 / terms[:, 1]).max(initial=1.0))
        if steepest > 1.0:
            slope[row] = steepest * INFLATION
        added = np.where(np.isfinite(terms[:, 0]), np.abs(terms[:, 0]), 0.0)
        added += np.abs(terms[:, 2]) + np.abs(terms[:, 3])
        size[row] = added.max(initial=0.0) * INFLATION
        own = np.empty((len(ids), ENTRY), np.int32)
        own[:, 0], own[:, 1] = row, ids
        own[:, 2:] = terms.view(np.int32)
        entries.append(own)
        counts[row] = len(ids)
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    return PackedSupport(offsets, np.concatenate(entries), slope, size)


def _row_support(
    a: Adjustments, row: int, vocabulary_size: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The adjusted ids [S] of a row, sorted, and their terms [S, 4].

    What a row has seen travels to the device as a list: its length, unlike what the host's search
    does with the table, grows with the history.
    """
    table = a.tables[a.table[row], :vocabulary_size] if a.table[row] >= 0 else NOTHING_SEEN
    bias = slice(a.bias_offsets[row], a.bias_offsets[row + 1])
    banned = a.banned[a.banned_offsets[row] : a.banned_offsets[row + 1]]
    seen_ids, bias_ids = np.flatnonzero(table).astype(np.int32), a.bias_ids[bias]
    ids = seen_ids
    if len(bias_ids) or len(banned):
        ids = np.unique(np.concatenate([seen_ids, bias_ids, banned]))
    terms = np.zeros((len(ids), ENTRY - 2), np.float32)
    terms[np.searchsorted(ids, bias_ids), 0] = a.bias_values[bias]
    terms[np.searchsorted(ids, banned), 0] = -np.inf
    terms[:, 1] = 1.0
    places = np.searchsorted(ids, seen_ids)
    counts = (table[seen_ids] - 1).astype(np.float32)
    terms[places, 1] = a.repetition[row]
    terms[places, 2] = a.frequency[row] * counts
    terms[places, 3] = np.where(counts > 0, a.presence[row], np.float32(0.0))
    below = ids < vocabulary_size
    return ids[below], terms[below]
