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

import torch
import triton

from kernels.blocks import blocks_of
from kernels.rows.triton_kernel import gather_logits
from kernels.screen import Screened
from kernels.search.gpu import triton_adjust as adjusting
from kernels.search.gpu import triton_bounds as bounding
from kernels.search.gpu import triton_candidates, triton_leaders
from kernels.search.gpu.triton_adjust import TILE

ADJUSTING_PROGRAMS = 64
COLUMNS = 1024  # of a hidden state at a time


@dataclass(frozen=True, slots=True, eq=False)
class PostProcessing:
    """What `kernels.rows.postprocess` does, with all that its roundings depend on."""

    bias: torch.Tensor | None  # [V] fp32
    scale: float
    softcap: float | None
    constants: torch.Tensor  # [5] float64: largest size and bias, |scale|, cap, scale

    @property
    def flags(self) -> dict[str, bool]:
        """What there is to do."""
        return {
            "BIAS": self.bias is not None,
            "SCALE": self.scale != 1.0,
            "SOFTCAP": self.softcap is not None,
        }

    @property
    def bias_or_nothing(self) -> torch.Tensor:
        """For kernels that do not read it where there is none."""
        return self.constants if self.bias is None else self.bias


class Questions(NamedTuple):
    """What the rows ask, as `kernels.search.gpu` reads it; IDLE rows ask nothing."""

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
    if leaders & (leaders - 1) or leaders < bounding.FEW:
        raise ValueError(f"{leaders} leaders: take a power of two from {bounding.FEW} on")
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


def adjust_estimates(
    hidden: torch.Tensor,
    screened: Screened,
    post: PostProcessing,
    reals: torch.Tensor,
    support: Support,
    factors: torch.Tensor,
    finite: torch.Tensor,
    size: int,
) -> None:
    """Post-processes and adjusts the estimates of ``size`` tokens in place, and fills ``factors``
    [N, 3] with what their errors are then and ``finite`` [N] with which hidden states are."""
    rows, columns = hidden.shape
    values = screened.estimate
    width = values.shape[1]
    adjusting.factors_kernel[(rows,)](
        hidden,
        screened.hidden_slack,
        reals,
        post.constants,
        factors,
        finite,
        columns,
        screened.hidden_slack.shape[1],
        **post.flags,
        COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )
    if any(post.flags.values()):
        adjusting.postprocess_kernel[(triton.cdiv(size, TILE), rows)](
            values,
            post.bias_or_nothing,
            post.constants,
            size,
            width,
            **post.flags,
            enable_fp_fusion=False,
        )
    adjusting.adjust_kernel[(ADJUSTING_PROGRAMS,)](
        values,
        support.entries,
        support.entries.view(torch.float32),
        support.offsets,
        rows,
        width,
        enable_fp_fusion=False,
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
    rows = len(hidden)
    size, width = weight.shape[0], screened.estimate.shape[1]
    values, row_slack = screened.estimate, screened.row_slack
    leaders, capacity = workspace.leaders.shape[1], workspace.candidates.shape[1]
    blocks, tiles = workspace.ceilings.shape[1], workspace.tile_counts.shape[1]
    post_flags = post.flags
    owned, token_ids = bounding.ALL_TOKENS, questions.integers
    if tokens.ids is not None:
        owned = bounding.WHOLE_BLOCKS if tokens.by_block else bounding.ANY_TOKENS
        token_ids = tokens.ids
    asked = (questions.integers, questions.reals, token_ids)
    bounds = (values, row_slack, workspace.factors, *asked)
    strides = (size, width, row_slack.stride(0))
    grid = (tiles, rows)
    terms = support.entries.view(torch.float32)
    adjust_estimates(
        hidden, screened, post, questions.reals, support, workspace.factors, workspace.finite, size
    )
    triton_leaders.summary_kernel[grid](
        *bounds,
        workspace.tops,
        workspace.ceilings,
        workspace.promises,
        *strides,
        blocks,
        OWNED=owned,
        enable_fp_fusion=False,
    )
    triton_leaders.select_kernel[(rows,)](
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
    triton_leaders.leaders_kernel[(rows,)](
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
    triton_leaders.thresholds_kernel[(rows,)](
        workspace.leaders,
        workspace.leader_counts,
        workspace.leader_logits,
        *asked,
        post.bias_or_nothing,
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
    triton_candidates.count_kernel[grid](
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
    triton_candidates.collect_kernel[grid](
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
