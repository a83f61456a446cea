"""Paged attention: right against float64, and a row's bits are its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.kernels import pool
from lexshard.kernels.attention import (
    BLOCK_SIZE,
    allocate_cache,
    matrix,
    paged_attention,
    write_cache,
)
from lexshard.kernels.attention.layout import kept_on_cpu
from lexshard.kernels.processor import multiplies_matrices
from tests.support.paths import ROOT

pytestmark = pytest.mark.vectors

HEAD_DIMS = (32, 48, 64, 80, 128, 256, 20)
GROUPS = ((1, 1), (4, 2), (3, 1), (7, 1), (8, 2), (6, 6), (40, 1))  # query heads, kv heads


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Sequences whose last tokens are queried: ``(context length, queried rows)`` each."""

    query: torch.Tensor  # [T, H, D]
    keys: list[torch.Tensor]  # [length, Hkv, D] per sequence
    values: list[torch.Tensor]
    row_sequence: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    scale: float
    window: int
    softcap: float
    cache: torch.dtype = torch.float32


def make_case(
    sequences: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    width: int,
    *,
    window: int = 0,
    softcap: float = 0.0,
    seed: int = 0,
    cache: torch.dtype = torch.float32,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    owners = [s for s, (_, rows) in enumerate(sequences) for _ in range(rows)]
    positions = [p for length, rows in sequences for p in range(length - rows, length)]
    return Case(
        query=normal(len(owners), heads, width) * 2,
        keys=[normal(length, kv_heads, width) for length, _ in sequences],
        values=[normal(length, kv_heads, width) for length, _ in sequences],
        row_sequence=torch.tensor(owners, dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        scale=width**-0.5,
        window=window,
        softcap=softcap,
        cache=cache,
    )


def fill(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches with the case's keys in scattered blocks, NaN everywhere else, and block tables."""
    blocks = [-(-keys.shape[0] // BLOCK_SIZE) for keys in case.keys]
    total = sum(blocks) + 3
    key_cache, value_cache = allocate_cache(total, *case.keys[0].shape[1:], dtype=case.cache)
    nothing = -1 if key_cache.dtype == torch.int32 else float("nan")  # in words: two that are NaN
    key_cache.fill_(nothing)
    value_cache.fill_(nothing)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for s, (keys, values, count) in enumerate(zip(case.keys, case.values, blocks, strict=True)):
        tables[s, :count] = order[sum(blocks[:s]) :][:count]
        place = torch.arange(keys.shape[0])
        slots = tables[s][place // BLOCK_SIZE].long() * BLOCK_SIZE + place % BLOCK_SIZE
        write_cache(keys, values, slots, key_cache, value_cache)
    return key_cache, value_cache, tables


def attend(
    case: Case, *, seed: int = 0, rows: slice = slice(None), implementation: str | None = None
) -> torch.Tensor:
    caches_and_tables = fill(case, seed)
    return paged_attention(
        case.query[rows],
        *caches_and_tables,
        case.row_sequence[rows],
        case.positions[rows],
        case.scale,
        case.window,
        case.softcap,
        implementation=implementation,  # type: ignore[arg-type]
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads, kv_heads = draw(st.sampled_from(GROUPS))
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 90))
        sequences.append((length, draw(st.integers(1, length))))
    width = draw(st.sampled_from(HEAD_DIMS))
    kept = kept_on_cpu(width, rounds=draw(st.booleans()))
    return make_case(
        sequences,
        heads,
        kv_heads,
        width,
        cache=kept,
        window=draw(st.sampled_from((0, 1, 5, 16, 23, 64))),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0, 50.0))),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=200)
@given(case=cases())
def test_agrees_with_float64(case: Case) -> None:
    """A score of up to 256 terms of size 2 errs by some 10^-6, values are of size 1. Weights that
    are rounded to bfloat16 err by 2^-9 each, of values that reach 5."""
    result = attend(case)
    expected = attend(case, implementation="reference")
    limit = 2e-5 if case.cache == torch.float32 else 5 * 2.0**-9
    assert float((result - expected).abs().max()) < limit


@settings(max_examples=150)
@given(case=cases(), data=st.data())
def test_a_row_has_the_same_bits_in_every_batch(case: Case, data: st.DataObject) -> None:
    """Alone, in any piece of the batch, and wherever its blocks lie."""
    whole = attend(case, seed=1)
    total = whole.shape[0]
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    assert torch.equal(attend(case, seed=2, rows=slice(start, stop)), whole[start:stop])
    alone = [attend(case, seed=3, rows=slice(t, t + 1)) for t in range(start, min(stop, start + 4))]
    assert torch.equal(torch.cat(alone), whole[start : start + len(alone)])


def test_rows_in_any_order_have_the_same_bits() -> None:
    case = make_case([(70, 60), (33, 33)], 4, 2, 64)
    whole = attend(case)
    order = torch.randperm(93, generator=torch.Generator().manual_seed(4))
    shuffled = paged_attention(
        case.query[order],
        *fill(case, 5),
        case.row_sequence[order],
        case.positions[order],
        case.scale,
    )
    assert torch.equal(shuffled, whole[order])


CACHES = pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])


@CACHES
def test_threads_do_not_change_bits(cache: torch.dtype) -> None:
    case = make_case([(400, 300), (90, 90), (500, 1)], 4, 2, 64, cache=cache)
    whole = attend(case)
    pool.set_threads(3)
    try:
        assert torch.equal(attend(case), whole)
    finally:
        pool.set_threads(1)


@pytest.mark.parametrize(("cache", "limit"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-3)])
def test_a_long_context_is_right(cache: torch.dtype, limit: float) -> None:
    case = make_case([(3000, 2)], 4, 2, 64, cache=cache)
    expected = attend(case, implementation="reference")
    assert float((attend(case) - expected).abs().max()) < limit


def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    case = make_case([(40, 40)], 2, 1, 32, seed=6)
    case.keys[0].mul_(300.0)
    result, expected = attend(case), attend(case, implementation="reference")
    assert bool(result.isfinite().all())
    # Scores of size 10^4 keep an absolute error of about 10^-3 in float32.
    assert float((result - expected).abs().max()) < 2e-2


@pytest.mark.skipif(not multiplies_matrices(), reason="needs a processor with AMX")
@pytest.mark.parametrize("members", [1, 2, 7, 16, 17, 31, 32, 33, 70])
@pytest.mark.parametrize("width", [32, 96, 128])
def test_vectors_attend_as_matrices_do(members: int, width: int) -> None:
    """What AMX makes of queries, and of weights, is what any processor can compute."""
    generator = np.random.default_rng(members)

    def words(*shape: int) -> np.ndarray:
        """bfloat16 between a hundredth and a hundred."""
        sizes = generator.integers(0x3C00, 0x4240, (2, *shape))
        halves = (sizes + 0x8000 * generator.integers(0, 2, (2, *shape))).astype(np.uint32)
        return np.asarray(halves[0] | halves[1] << 16)

    for blocks in (1, 2, 3, 4, 5, 9):
        heads, low, high = 3, 1, 3
        table = generator.permutation(blocks + 2).astype(np.int32)
        keys = words(blocks + 2, heads, width // 2, BLOCK_SIZE)
        values = words(blocks + 2, heads, BLOCK_SIZE // 2, width)
        queries = words(2 * members + 3, width // 2)
        part = np.int64(1), np.int64(blocks)
        found, expected = np.zeros((2, 2 * members, BLOCK_SIZE * blocks), np.float32)
        given = queries, np.int64(3), np.int64(members), keys, table, *part
        matrix._score(*given, np.int64(low), np.int64(high), found)
        matrix._score_in_vectors(*given, np.int64(low), np.int64(high), expected)
        assert np.array_equal(found, expected)
        weights, ends = words(2 * members, 8 * blocks), words(2, BLOCK_SIZE // 2, width)
        found, expected = np.zeros((2, 2 * members, width), np.float32)
        matrix._sum_values(
            weights, np.int64(members), values, table, *part, np.int64(low), ends, found
        )
        matrix._sum_values_in_vectors(
            weights, np.int64(members), values, table, *part, np.int64(low), ends, expected
        )
        assert np.array_equal(found, expected)


@CACHES
@pytest.mark.parametrize("length", range(1, 19))
def test_what_an_earlier_owner_left_behind_cannot_leak(cache: torch.dtype, length: int) -> None:
    """`fill` leaves NaN in every slot that has no owner."""
    case = make_case([(length, length), (5, 5)], 4, 2, 48, window=4, softcap=3.0, cache=cache)
    assert bool(attend(case).isfinite().all())


def test_a_token_that_is_written_again_leaves_the_one_before_it() -> None:
    """A guess that is taken back: what is written in its place shares a word with a token that
    stays."""
    case = make_case([(14, 1)], 4, 2, 32, cache=torch.bfloat16)
    caches_and_tables = key_cache, value_cache, tables = fill(case, 0)
    for place in (13, 12, 13):
        slot = tables[0, :1].long() * BLOCK_SIZE + place
        noise = torch.randn(2, 1, 2, 32, generator=torch.Generator().manual_seed(place))
        write_cache(*noise, slot, key_cache, value_cache)
    for place in (12, 13):
        slot = tables[0, :1].long() * BLOCK_SIZE + place
        own = slice(place, place + 1)
        write_cache(case.keys[0][own], case.values[0][own], slot, key_cache, value_cache)
    place_in_case = case.row_sequence, case.positions, case.scale
    assert torch.equal(
        paged_attention(case.query, *caches_and_tables, *place_in_case), attend(case)
    )


needs_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_writes_go_where_the_reference_puts_them(device: str) -> None:
    generator = torch.Generator().manual_seed(7)
    key, value = (torch.randn(9, 3, 20, generator=generator).to(device) for _ in range(2))
    slots = torch.randperm(4 * BLOCK_SIZE, generator=generator)[:9].to(device)
    ours, expected = (allocate_cache(4, 3, 20, device=device) for _ in range(2))
    write_cache(key, value, slots, *ours)
    write_cache(key, value, slots, *expected, implementation="reference")
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_bfloat16_goes_where_the_reference_puts_it() -> None:
    generator = torch.Generator().manual_seed(7)
    key, value = (torch.randn(40, 3, 48, generator=generator) for _ in range(2))
    slots = torch.cat([torch.arange(19), torch.arange(35, 56)])
    ours, expected = (allocate_cache(4, 3, 48, dtype=torch.bfloat16) for _ in range(2))
    write_cache(key, value, slots, *ours)
    write_cache(key, value, slots, *expected, implementation="reference")
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_head_counts_and_cache_types_that_do_not_fit_are_refused() -> None:
    case = make_case([(5, 5)], 4, 2, 32)
    with pytest.raises(ValueError, match="evenly"):
        paged_attention(
            case.query[:, :3], *fill(case, 0), case.row_sequence, case.positions, case.scale
        )
    with pytest.raises(ValueError, match="multiple of 16"):
        allocate_cache(1, 1, 40, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        allocate_cache(1, 1, 32, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_memory_where_it_is_written(dtype: torch.dtype) -> None:
    """A server at rest holds no more than its texts have needed."""
    process, size = pytest.importorskip("psutil").Process(), 1 << 28
    before = process.memory_info().rss
    caches = allocate_cache(size // (2 * 64 * BLOCK_SIZE * dtype.itemsize), 1, 64, dtype=dtype)
    assert sum(each.nbytes for each in caches) == size
    assert process.memory_info().rss - before < size / 8
    assert all(each.data_ptr() % 64 == 0 for each in caches)  # no vector crosses a cache line
    assert not any(each[::1000].any() for each in caches)


def test_queries_of_any_stride_are_taken() -> None:
    """transformers hands over [1, H, T, D]."""
    case = make_case([(20, 20)], 4, 2, 32)
    strided = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    result = paged_attention(strided, *fill(case, 0), case.row_sequence, case.positions, case.scale)
    assert torch.equal(result, attend(case))


# -- triton ---------------------------------------------------------------------------------------

TRITON_CASES = (
    make_case([(5, 5), (130, 1), (101, 70)], 4, 2, 64),
    make_case([(90, 3), (33, 33)], 7, 1, 48, window=19),
    make_case([(150, 40), (1, 1)], 5, 5, 80, softcap=2.0),
    make_case([(70, 2)], 2, 2, 256, window=33, softcap=5.0),
)
SPLITS = (1024, 64)  # keys per split: one split, several
# Every case with keys in either order and any split; and of these a few in which each comes.
ALL_CALLS = tuple(product(TRITON_CASES, (True, False), SPLITS))
FEW_CALLS = tuple(zip(TRITON_CASES, (True, False, True, False), (64, 64, 1024, 1024), strict=True))


def triton_difference(
    device: str, dtype: torch.dtype, calls: tuple[tuple[Case, bool, int], ...] = ALL_CALLS
) -> float:
    """Largest difference of the Triton kernel to the float64 reference of the same inputs."""
    from lexshard.kernels.attention import triton_kernel

    largest = 0.0
    for case, by_token, split in calls:
        key_cache, value_cache, tables = fill(case, 8)
        caches = [cache.to(dtype) for cache in (key_cache, value_cache)]
        if by_token:  # as a GPU has it
            caches[0] = caches[0].transpose(2, 3).contiguous().transpose(2, 3)
        query = case.query.to(dtype)
        rows = (case.row_sequence, case.positions)
        limits = (case.scale, case.window, case.softcap)
        expected = paged_attention(
            query.double(), *caches, tables, *rows, *limits, implementation="reference"
        )
        moved = [each.to(device) for each in (query, *caches, tables, *rows)]
        out = torch.full_like(moved[0], float("nan"))
        triton_kernel.paged_attention(*moved, *limits, out, split_keys=split)
        difference = (out.cpu().double() - expected).abs().max()
        assert bool(difference.isfinite())
        largest = max(largest, float(difference))
    return largest


def triton_writes_all(device: str, dtype: torch.dtype) -> bool:
    """Whether the Triton kernel puts keys, in either order, and values where the reference does,
    and touches nothing else."""
    from lexshard.kernels.attention import triton_kernel

    generator = torch.Generator().manual_seed(9)
    for (rows, width), by_token in product(((1, 20), (9, 48), (40, 96), (3, 256)), (True, False)):
        # As transformers hands them over: heads before tokens.
        both = torch.randn(2, 3, rows, width, generator=generator).to(device).transpose(1, 2)
        slots = torch.randperm(4 * BLOCK_SIZE, generator=generator)[:rows].to(device)
        ours = [each.to(device, dtype) for each in allocate_cache(4, 3, width)]
        if by_token:
            ours[0] = ours[0].transpose(2, 3).contiguous().transpose(2, 3)
        expected = [each.clone() for each in ours]
        triton_kernel.write_cache(both[0], both[1], slots, *ours)
        write_cache(both[0], both[1], slots, *expected, implementation="reference")
        if not all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)):
            return False
    return True


def test_a_few_rows_are_split_among_more_programs_unless_contexts_are_long() -> None:
    pytest.importorskip("triton")
    from lexshard.kernels.attention.triton_kernel import _split_keys

    assert [_split_keys(rows, 8192) for rows in (1, 32, 33, 64, 65)] == [256, 256, 1024, 1024, 8192]
    assert _split_keys(1, 131_072) == 1024


@pytest.mark.parametrize("calls", ["FEW_CALLS", pytest.param("ALL_CALLS", marks=pytest.mark.slow)])
def test_triton_kernel_agrees_with_float64_in_the_interpreter(calls: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    pytest.importorskip("triton")
    program = (
        "import torch; torch.set_num_threads(1); "
        f"from tests.kernels.test_attention import {calls}, triton_difference, triton_writes_all; "
        "assert triton_writes_all('cpu', torch.float32); "
        f"print(triton_difference('cpu', torch.float32, {calls}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 5e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_triton_kernel_agrees_with_float64_on_a_gpu(dtype: torch.dtype, limit: float) -> None:
    assert triton_difference("cuda", dtype) < limit
    assert triton_writes_all("cuda", dtype)
