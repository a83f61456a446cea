"""Attention by FlashInfer, where it is installed.

Its kernels are planned on the host: before a step it is told which rows are whose and where their
keys lie, and how work is shared out then lies in its own memory, from which a CUDA graph can replay
it. A step is a list of requests, rows of one sequence each, whose last row is the sequence's newest
token; padding is one more request, in a block that no other has.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.attention_step import AttentionSettings
from lexshard.actors.body.batch import Batch
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache, paged_attention, write_cache

WORKSPACE_BYTES = 384 << 20  # partial sums of split contexts, one step at a time
# Of a plan: what the library itself takes, and what plans of the rows of a graph leave room in.
PLAN_BYTES, GRAPH_PLAN_BYTES = 8 << 20, 1 << 20
MOST_ROWS = 512  # of a graph
TYPES = (torch.bfloat16, torch.float16)

Int32s = npt.NDArray[np.int32]


class AttentionShape(NamedTuple):
    """Heads and numbers, the same for every layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class PlannedRequests(NamedTuple):
    """The R requests of a step, as FlashInfer takes them."""

    row_starts: Int32s  # [R + 1] of the packed rows
    page_starts: Int32s  # [R + 1] of ``pages``
    pages: Int32s  # [P] blocks of the cache
    last_page_lengths: Int32s  # [R] tokens in each request's last block, 1 to 16


def requests_of(
    batch: Batch, *, rows: int | None = None, requests: int | None = None, scratch_block: int = 0
) -> PlannedRequests:
    """The requests of ``batch``, padded to ``rows`` rows and ``requests`` requests if those are
    given, one more than there are sequences at least.

    Rows of padding are the whole text of the last request, in ``scratch_block`` as often as that
    takes; requests before it that are not asked for have no rows, and one token there.
    """
    sequences = len(batch.block_tables)
    count = len(batch.row_sequence)
    lengths = np.bincount(batch.row_sequence, minlength=sequences)
    ends = np.cumsum(lengths)
    tokens = np.ones(sequences, np.int64)
    present = lengths > 0
    tokens[present] = batch.positions[ends[present] - 1].astype(np.int64) + 1
    used = -(-tokens // BLOCK_SIZE)
    pages = [table[:own] for table, own in zip(batch.block_tables, used.tolist(), strict=True)]
    if rows is not None and requests is not None:
        idle = requests - 1 - sequences
        padding = rows - count
        lengths = np.concatenate([lengths, np.zeros(idle, np.int64), [padding]])
        tokens = np.concatenate([tokens, np.ones(idle, np.int64), [max(padding, 1)]])
        used = -(-tokens // BLOCK_SIZE)
        pages.append(np.full(int(used[sequences:].sum()), scratch_block, np.int32))
    return PlannedRequests(
        np.cumsum([0, *lengths], dtype=np.int32),
        np.cumsum([0, *used], dtype=np.int32),
        np.concatenate(pages).astype(np.int32),
        ((tokens - 1) % BLOCK_SIZE + 1).astype(np.int32),
    )


class PlannedSteps:
    """Attention of steps of one shape, or of any shape where no graph replays it.

    ``wrappers`` are the library's, one for each of the settings that layers have.
    """

    def __init__(
        self,
        shape: AttentionShape,
        wrappers: dict[AttentionSettings, Any],
        device: torch.device,
        *,
        rows: int | None = None,
        requests: int | None = None,
    ) -> None:
        self._shape = shape
        self._wrappers = wrappers
        self._device = device
        self._rows, self._requests = rows, requests
        self._sent: torch.cuda.Event | None = None

    def plan(self, batch: Batch, scratch_block: int = 0) -> None:
        """Must come before the step of ``batch`` is computed. Raises what the library does."""
        if self._sent is not None:
            # The library's page-locked memory is written anew: the last plan must have left it.
            self._sent.synchronize()
        planned = requests_of(
            batch, rows=self._rows, requests=self._requests, scratch_block=scratch_block
        )
        row_starts, page_starts, pages, last = (self._pinned(each) for each in planned)
        # The library would wait for the device to copy these.
        pages = pages.to(self._device, non_blocking=True)
        heads, kv_heads, head_dim, dtype = self._shape
        for (scale, window, softcap), wrapper in self._wrappers.items():
            wrapper.plan(
                row_starts,
                page_starts,
                pages,
                last,
                heads,
                kv_heads,
                head_dim,
                BLOCK_SIZE,
                causal=True,
                sm_scale=scale,
                window_left=window - 1,  # tokens before a row's own; -1: all of them
                logits_soft_cap=softcap,
                q_data_type=dtype,
                kv_data_type=dtype,
            )
        if self._device.type == "cuda":
            self._sent = torch.cuda.Event()
            self._sent.record()

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        settings: AttentionSettings,
        out: torch.Tensor,
    ) -> None:
        """`kernels.attention.paged_attention` of the planned rows, into ``out`` [T, H, D]."""
        caches = (key_cache.transpose(2, 3), value_cache)  # a key in one run of memory
        self._wrappers[settings].run(query, caches, out=out)

    def _pinned(self, values: Int32s) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


class FlashInferAttention:
    """The ``library`` with memory for the steps of one model, of which one is computed at a time;
    no sequence has more than ``longest`` blocks.

    Raises ValueError for numbers that its kernels do not take.
    """

    def __init__(
        self,
        library: ModuleType,
        shape: AttentionShape,
        settings: Sequence[AttentionSettings],
        device: torch.device,
        longest: int,
    ) -> None:
        if device.type == "cuda" and shape.dtype not in TYPES:
            raise ValueError(f"it does not compute in {str(shape.dtype).removeprefix('torch.')}")
        self._library = library
        self._shape = shape
        self._settings = tuple(dict.fromkeys(settings))
        self._device = device
        self._workspace = self._memory(WORKSPACE_BYTES)
        # Plans of one step lie beside each other; those of the next overwrite them in their turn.
        self._plans = {each: self._memory(GRAPH_PLAN_BYTES) for each in self._settings}
        self._longest = longest
        self._pages = self._numbers(_pages_of(MOST_ROWS, MOST_ROWS, longest))
        self.of_any_shape = PlannedSteps(
            shape,
            {each: self._wrapper(self._memory(PLAN_BYTES)) for each in self._settings},
            device,
        )

    def of_shape(self, rows: int, sequences: int) -> PlannedSteps:
        """For graphs of ``rows`` rows of up to ``sequences`` sequences, and of padding."""
        requests = sequences + 1
        pages = self._pages[: _pages_of(rows, sequences, self._longest)]
        wrappers = {
            each: self._wrapper(
                self._plans[each],
                use_cuda_graph=True,
                qo_indptr_buf=self._numbers(requests + 1),
                paged_kv_indptr_buf=self._numbers(requests + 1),
                paged_kv_indices_buf=pages,
                paged_kv_last_page_len_buf=self._numbers(requests),
            )
            for each in self._settings
        }
        return PlannedSteps(self._shape, wrappers, self._device, rows=rows, requests=requests)

    def largest_difference(self) -> float:
        """To our attention, relative to the largest value: chunks and single rows of contexts that
        are longer than any window, where there is one."""
        heads, kv_heads, head_dim, dtype = self._shape
        longest = max(each.window for each in self._settings) + 40
        ends, lengths = (longest, longest // 2 + 3, 17), (9, 1, 17)
        blocks = -(-longest // BLOCK_SIZE)
        tables = np.random.default_rng(0).permutation(3 * blocks).astype(np.int32).reshape(3, -1)
        batch = Batch(
            token_ids=np.zeros(sum(lengths), np.int32),
            positions=np.concatenate(
                [
                    np.arange(end - own, end, dtype=np.int32)
                    for end, own in zip(ends, lengths, strict=True)
                ]
            ),
            slots=np.zeros(sum(lengths), np.int64),
            row_sequence=np.repeat(np.arange(3, dtype=np.int32), lengths),
            block_tables=tables,
            output_rows=np.zeros(0, np.int32),
        )
        generator = torch.Generator(device=self._device).manual_seed(0)

        def normal(*lengths: int) -> torch.Tensor:
            numbers = torch.randn(*lengths, generator=generator, device=self._device)
            return numbers.to(dtype)

        caches = allocate_cache(3 * blocks, kv_heads, head_dim, device=self._device, dtype=dtype)
        count = 3 * blocks * BLOCK_SIZE
        slots = torch.arange(count, device=self._device)
        write_cache(
            normal(count, kv_heads, head_dim), normal(count, kv_heads, head_dim), slots, *caches
        )
        query = 3.0 * normal(sum(lengths), heads, head_dim)
        table, owners, places = (
            torch.from_numpy(each).to(self._device)
            for each in (batch.block_tables, batch.row_sequence, batch.positions)
        )
        self.of_any_shape.plan(batch)
        worst = 0.0
        for settings in self._settings:
            scale, window, softcap = settings
            expected = paged_attention(
                query, *caches, table, owners, places, scale, window, softcap
            )
            found = torch.empty_like(expected)
            self.of_any_shape.attend(query, *caches, settings, found)
            difference = (found - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(difference))
        return worst

    def _wrapper(self, plan: torch.Tensor, **options: Any) -> Any:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, kv_layout="HND", backend="fa2", **options
        )
        wrapper.reset_workspace_buffer(self._workspace, plan)
        return wrapper

    def _memory(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _numbers(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int32, device=self._device)


def _pages_of(rows: int, sequences: int, longest: int) -> int:
    """Blocks that a step of ``rows`` rows names at most, those of its padding included."""
    return sequences * longest + sequences + 1 + -(-rows // BLOCK_SIZE)
