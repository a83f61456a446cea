"""Stands for FlashInfer where there is none: its paged attention as its documentation says.

What a plan is given is copied into the caller's buffers, and a run reads nothing else, as in a CUDA
graph; every computation is an operator of torch, which a tape can hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "HND"
        assert backend == "fa2"
        self._fixed = use_cuda_graph
        self._buffers = (
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )
        self._rows: int | None = None

    def reset_workspace_buffer(self, floats: torch.Tensor, integers: torch.Tensor) -> None:
        assert floats.dtype == integers.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert causal
        assert q_data_type == kv_data_type
        assert all(each.dtype == torch.int32 for each in given)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool((paged_kv_indptr.diff() > 0).all())
        assert bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all())
        tokens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert bool((qo_indptr.diff() <= tokens).all())
        self._heads = num_qo_heads // num_kv_heads
        self._head_dim, self._page = head_dim_qk, page_size
        self._scale, self._left, self._cap = sm_scale, window_left, logits_soft_cap
        self._planned = int(qo_indptr[-1])
        if not self._fixed:
            self._buffers = given
            return
        assert self._rows is None or int(qo_indptr[-1]) <= self._rows
        self._rows = self._rows or int(qo_indptr[-1])
        for buffer, values in zip(self._buffers, given, strict=True):
            assert buffer is not None
            assert len(values) == len(buffer) or (
                values is paged_kv_indices and len(values) <= len(buffer)
            )
            buffer[: len(values)].copy_(values)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        assert len(q) == self._planned
        assert out.is_contiguous()
        starts, page_starts, pages, last = (each for each in self._buffers if each is not None)
        row = torch.arange(len(q))
        owner = torch.searchsorted(starts, row, right=True) - 1
        tokens = (page_starts.diff() - 1) * self._page + last
        place = tokens[owner] - starts[owner + 1] + row
        longest = len(pages) * self._page if self._fixed else int(tokens.max())
        key = torch.arange(longest)
        index = (page_starts[owner][:, None] + key // self._page).clamp(max=len(pages) - 1)
        block, offset = pages[index].long(), (key % self._page).expand(len(q), -1)

        def gathered(cache: torch.Tensor) -> Any:  # [T, keys, heads, D]
            return cache[block, :, offset].repeat_interleave(self._heads, dim=2)

        keys, values = (gathered(each) for each in paged_kv_cache)
        scores = torch.einsum("thd,tkhd->thk", q, keys) * self._scale
        if self._cap > 0.0:
            scores = self._cap * torch.tanh(scores / self._cap)
        reached = key <= place[:, None]
        if self._left >= 0:
            reached = reached & (key >= place[:, None] - self._left)
        scores = scores.masked_fill(~reached[:, None], -math.inf)
        out.copy_(torch.einsum("thk,tkhd->thd", scores.softmax(dim=-1), values))
        return out
