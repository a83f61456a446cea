"""The whole search on a device: fixed buffers, fixed launches, nothing the host waits for.

From estimates to the canonical products of every token that can still matter, in one sequence of
launches that a CUDA graph can hold:

1. `begin`, which needs no estimates: norms of hidden states, the noise of blocks of 64 ids;
2. estimates are post-processed, adjusted and masked in place, where there is anything to do;
3. per block of ids: a bound on every score, for which the error of each row is widened by what
   those operations can cost, and what the best estimate promises;
4. the leaders (at most `Buffers.leaders.shape[1]` a row);
5. their canonical products, and from these scores that they certainly reach;
6. every id whose upper bound reaches the best of these scores (or the k-th), tile by tile;
7. these in one sorted list, and their canonical products;
8. what a row draws from these: a guess at what the host will decide;
9. whether that lies in the row's nucleus, where it draws from one.

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

from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.rows.triton_kernel import (
    GATHERED_TOKENS,
    Factors,
    gathering,
    gathering_programs,
)
from lexshard.kernels.screen import Screened
from lexshard.kernels.search.gpu import triton_adjust as adjusting
from lexshard.kernels.search.gpu import triton_bounds as bounding
from lexshard.kernels.search.gpu import triton_candidates, triton_draw, triton_leaders
from lexshard.kernels.search.gpu import triton_membership as membership
from lexshard.kernels.search.gpu.triton_adjust import TILE
from lexshard.kernels.search.gpu.triton_bounds import BlockDraws, EstimatedRows, Questions
from lexshard.kernels.search.gpu.triton_leaders import BLOCKS_AT_A_TIME

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


class Tokens(NamedTuple):
    """Which tokens of the vocabulary the rows are, by whose ids their noise is drawn."""

    ids: torch.Tensor | None  # [V] int32 ascending; None where row i is token i
    by_block: bool = True  # every 64 rows are a block of the vocabulary


class Support(NamedTuple):
    """The tokens whose logits are adjusted: row ``r`` owns ``offsets[r]:offsets[r + 1]``."""

    offsets: torch.Tensor  # [N + 1] int64
    entries: torch.Tensor  # [S, 6] int32: row, id (sorted within a row), four fp32 terms


class RowMasks(NamedTuple):
    """Which tokens rows may have: row ``r`` those of ``words[places[r]]``, any where that is -1."""

    words: torch.Tensor  # [M, width] int64, a bit per row of the shard
    places: torch.Tensor  # [N] int64
    width: int


EVERY_TOKEN = Tokens(None)


class Buffers(NamedTuple):
    """What launches of a search of N rows leave for those that follow."""

    norms: torch.Tensor  # [N] float64, of hidden states
    factors: torch.Tensor  # [N, 3] fp32
    tops: torch.Tensor  # [N, blocks] fp32
    ceilings: torch.Tensor  # [N, blocks] float64
    promises: torch.Tensor  # [N, blocks] fp32
    chosen: torch.Tensor  # [N, L] int32
    leaders: torch.Tensor  # [N, L] int32
    leader_counts: torch.Tensor  # [N] int32
    leader_scores: torch.Tensor  # [N, L] float64
    thresholds: torch.Tensor  # [N] float64
    tile_counts: torch.Tensor  # [N, tiles] int32
    levels: torch.Tensor  # [N] fp32, the logit that is drawn, or -inf
    masses: torch.Tensor  # [N, tiles, 2] fp32, see `triton_membership`


class Results(NamedTuple):
    """What a search of N rows has found."""

    largest: torch.Tensor  # [N] fp32, the largest upper bound of a logit
    finite: torch.Tensor  # [N] int32, 0 where the hidden state has NaN or infinity
    counts: torch.Tensor  # [N] int32, above C where there was no room for all
    drawn: torch.Tensor  # [N] int32, a row of the weights or -1
    candidates: torch.Tensor  # [N, C] int32
    logits: torch.Tensor  # [N, C] fp32, canonical products before post-processing


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """The memory of one search of N rows; ``memory`` [N (4 + 2 C)] int32 is that of its results."""

    draws: BlockDraws
    buffers: Buffers
    memory: torch.Tensor
    results: Results
    owned: int  # what `OWNED` says


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
    rows: int,
    size: int,
    *,
    capacity: int,
    leaders: int,
    device: torch.device | str,
    tokens: Tokens = EVERY_TOKEN,
) -> Workspace:
    """Memory for ``rows`` hidden states over ``size`` ids, which are ``tokens``; ``leaders`` is a
    power of two, or ValueError is raised."""
    if leaders & (leaders - 1) or leaders < bounding.FEW:
        raise ValueError(f"{leaders} leaders: take a power of two from {bounding.FEW} on")
    blocks, tiles = blocks_of(size), triton.cdiv(size, TILE)

    def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    memory = zeros(torch.int32, rows * (4 + 2 * capacity))
    ids, owned = tokens.ids, bounding.ALL_TOKENS
    if ids is not None:
        owned = bounding.WHOLE_BLOCKS if tokens.by_block else bounding.ANY_TOKENS
    winners = zeros(torch.int32, rows, blocks)
    smallest = zeros(torch.float64, rows, blocks)
    buffers = Buffers(
        norms=zeros(torch.float64, rows),
        factors=zeros(torch.float32, rows, 3),
        tops=zeros(torch.float32, rows, blocks),
        ceilings=zeros(torch.float64, rows, blocks),
        promises=zeros(torch.float32, rows, blocks),
        chosen=zeros(torch.int32, rows, leaders),
        leaders=zeros(torch.int32, rows, leaders),
        leader_counts=zeros(torch.int32, rows),
        leader_scores=zeros(torch.float64, rows, leaders),
        thresholds=zeros(torch.float64, rows),
        tile_counts=zeros(torch.int32, rows, tiles),
        levels=zeros(torch.float32, rows),
        masses=zeros(torch.float32, rows, tiles, 2),
    )
    return Workspace(
        BlockDraws(winners if ids is None else ids, smallest, winners, size, blocks),
        buffers,
        memory,
        unpack_results(memory, rows),
        owned,
    )


def unpack_results(memory: torch.Tensor, rows: int) -> Results:
    """What lies in `Workspace.memory`, or in a copy of it."""
    capacity = (memory.numel() // rows - 4) // 2
    largest, finite, counts, drawn, candidates, logits = memory.split(
        [rows, rows, rows, rows, rows * capacity, rows * capacity]
    )
    shape = (rows, capacity)
    logits = logits.view(torch.float32).view(shape)
    return Results(
        largest.view(torch.float32), finite, counts, drawn, candidates.view(shape), logits
    )


def screened_rows(screened: Screened, size: int) -> EstimatedRows:
    """Estimates of ``size`` ids as kernels read them."""
    values, row_slack, hidden_slack = screened
    lengths = (size, values.shape[1], row_slack.stride(0), hidden_slack.shape[1])
    return EstimatedRows(values, row_slack, hidden_slack, *lengths)


def adjust_estimates(
    screened: EstimatedRows, post: PostProcessing, support: Support | None, masks: RowMasks | None
) -> None:
    """Post-processes the estimates in place, adjusts those of ``support`` and leaves those that
    ``masks`` have."""
    rows = len(screened.estimates)
    if any(post.flags.values()):
        adjusting.postprocess_kernel[(triton.cdiv(screened.size, TILE), rows)](
            screened, post.bias_or_nothing, post.constants, **post.flags, enable_fp_fusion=False
        )
    if support is not None:
        adjusting.adjust_kernel[(ADJUSTING_PROGRAMS,)](
            screened, support, rows, enable_fp_fusion=False
        )
    if masks is not None:
        adjusting.mask_kernel[(triton.cdiv(screened.size, TILE), rows)](screened, masks)


def amend(support: Support, tokens: torch.Tensor, questions: Questions) -> None:
    """Counts one more token that each penalised row has seen, ``tokens`` [N] int32 or -1, in a
    ``support`` that has room for it."""
    rows = (len(tokens),)
    adjusting.amend_kernel[rows](support, tokens, questions.reals, enable_fp_fusion=False)


def begin(hidden: torch.Tensor, questions: Questions, workspace: Workspace) -> None:
    """What a `search` needs and no estimate tells: it may run beside the screen."""
    rows, columns = hidden.shape
    draws, owned = workspace.draws, workspace.owned
    drawing = 0 if owned == bounding.ANY_TOKENS else triton.cdiv(draws.blocks, BLOCKS_AT_A_TIME)
    triton_leaders.begin_kernel[(1 + drawing, rows)](
        hidden,
        columns,
        questions,
        draws,
        workspace.buffers.norms,
        workspace.results.finite,
        OWNED=owned,
        COLUMNS=COLUMNS,
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
    *,
    adjusts: bool = True,
    masks: RowMasks | None = None,
) -> None:
    """Fills ``workspace``, of which `begin` has filled its part; see the steps above.

    ``hidden`` [N, d] fp32, contiguous; ``weight`` [V, d] fp32 or bf16; ``screened`` their estimates
    [N, W] with ``W >= V``, which are overwritten. All on one device, CUDA or, for
    Triton's interpreter, the CPU. Unless it ``adjusts``, ``support`` must be empty.
    """
    rows, columns = hidden.shape
    estimates = screened_rows(screened, weight.shape[0])
    buffers, results, draws = workspace.buffers, workspace.results, workspace.draws
    leaders, capacity = buffers.leaders.shape[1], results.candidates.shape[1]
    tiles, owned = buffers.tile_counts.shape[1], workspace.owned
    asked = (questions, draws, buffers)
    products = Factors.of(hidden, weight)
    adjust_estimates(estimates, post, support if adjusts else None, masks)
    triton_leaders.summary_kernel[(tiles, rows)](
        estimates, *asked, post.constants, **post.flags, OWNED=owned, enable_fp_fusion=False
    )
    triton_leaders.leaders_kernel[(rows,)](
        estimates,
        *asked,
        results.largest,
        BLOCKS=triton.next_power_of_2(draws.blocks),
        LEADERS=leaders,
        OWNED=owned,
        num_warps=16,
        enable_fp_fusion=False,
    )
    triton_leaders.scores_kernel[(triton.cdiv(leaders, GATHERED_TOKENS), rows)](
        products,
        *asked,
        post.bias_or_nothing,
        post.constants,
        support,
        **post.flags,
        OWNED=owned,
        LEADERS=leaders,
        **gathering(columns),
        enable_fp_fusion=False,
    )
    found = torch.empty(rows, tiles * TILE, dtype=torch.int32, device=hidden.device)
    triton_candidates.collect_kernel[(tiles, rows)](
        estimates,
        *asked,
        found,
        tiles,
        LEADERS=leaders,
        OWNED=owned,
        num_warps=8,
        enable_fp_fusion=False,
    )
    triton_candidates.candidates_kernel[(gathering_programs(capacity, rows), rows)](
        products,
        buffers.tile_counts,
        found,
        results,
        tiles,
        capacity,
        TILES=triton.next_power_of_2(tiles),
        **gathering(columns),
        enable_fp_fusion=True,
    )
    draw(questions, draws.token_ids, results, post, support, levels=buffers.levels, owned=owned)
    if owned == bounding.ALL_TOKENS:
        keep_members(estimates, questions, workspace)


def keep_members(estimates: EstimatedRows, questions: Questions, workspace: Workspace) -> None:
    """Of rows that draw from their nucleus, takes back what may lie outside of it: their counts say
    that there was no room for all candidates."""
    buffers, results = workspace.buffers, workspace.results
    rows, tiles = buffers.tile_counts.shape
    membership.masses_kernel[(tiles, rows)](
        estimates, questions, buffers, results, tiles, enable_fp_fusion=False
    )
    membership.members_kernel[(rows,)](
        questions,
        buffers,
        results,
        tiles,
        results.candidates.shape[1],
        TILES=triton.next_power_of_2(tiles),
        enable_fp_fusion=False,
    )


def draw(
    questions: Questions,
    token_ids: torch.Tensor,
    results: Results,
    post: PostProcessing,
    support: Support,
    *,
    levels: torch.Tensor,
    owned: int = bounding.ALL_TOKENS,
) -> None:
    """Fills in what each row draws from its candidates, which ``token_ids`` name as `BlockDraws`
    says, and its logit (``levels`` [N] fp32)."""
    rows, capacity = results.candidates.shape
    triton_draw.draw_kernel[(rows,)](
        questions,
        token_ids,
        results,
        post.bias_or_nothing,
        post.constants,
        support,
        levels,
        capacity,
        **post.flags,
        OWNED=owned,
        SIZE=triton.next_power_of_2(max(capacity, 2)),
        num_warps=8,
        enable_fp_fusion=False,
    )
