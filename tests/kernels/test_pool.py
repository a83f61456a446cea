"""Work is shared out whole and in order, and stale kernels are never loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.kernels import pool
from lexshard.kernels.compile_cache import sources_digest
from tests.support.paths import ROOT


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), parts=st.integers(1, 8))
def test_shares_cover_everything_once_in_order(sizes: list[int], parts: int) -> None:
    shares = pool.even_shares(sizes, parts)
    assert 1 <= len(shares) <= parts
    assert [i for first, last in shares for i in range(first, last)] == list(range(len(sizes)))
    largest = max(sum(sizes[first:last]) for first, last in shares)
    assert largest <= sum(sizes) / parts + max(sizes)


def test_every_piece_runs_and_errors_come_back() -> None:
    try:
        pool.set_threads(3)
        done: list[int] = []
        pool.run([lambda i=i: done.append(i) for i in range(5)])  # type: ignore[misc]
        assert sorted(done) == list(range(5))

        def fail() -> None:
            raise ArithmeticError("broken")

        with pytest.raises(ArithmeticError):
            pool.run([lambda: None, fail])
    finally:
        pool.set_threads(1)
    with pytest.raises(ValueError, match="at least 1"):
        pool.set_threads(0)
    with pytest.raises(ValueError, match="one row"):
        pool.set_threads_by_rows(((2, 1),))


def test_a_step_has_the_threads_of_its_rows_and_pieces_no_more() -> None:
    lock, met = threading.Lock(), threading.Barrier(1)
    threads: set[int] = set()

    def piece() -> None:
        with lock:
            new = threading.get_ident() not in threads
            threads.add(threading.get_ident())
        if new:  # however late a thread wakes, the others have a piece in hand until it has one
            met.wait(timeout=60)

    try:
        pool.set_threads_by_rows(((1, 1), (4, 3), (8, 2)))
        for rows, expected in ((1, 1), (3, 1), (4, 3), (7, 3), (8, 2), (500, 2), (1, 1)):
            threads.clear()
            met = threading.Barrier(expected)
            assert pool.begin_step(rows) == pool.threads() == expected
            pool.run([piece] * 7)
            assert len(threads) == expected
    finally:
        pool.set_threads(1)


def test_what_is_done_once_has_every_core_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One more would wake up for every step of the engine that comes after."""
    monkeypatch.setattr(pool, "available_cores", lambda: 9)

    def helpers() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return [name for name in names if name.startswith("kernels")]

    with pool.every_core():
        assert pool.threads() == 9
        pieces = [lambda i=i: i * i for i in range(40)]  # type: ignore[misc]
        assert pool.results(pieces) == [i * i for i in range(40)]
        assert helpers()
    assert pool.threads() == 1
    assert not helpers()


def test_the_compile_cache_follows_every_source(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner" / "b.py").write_text("y = 1\n")
    before = sources_digest(tmp_path)
    assert sources_digest(tmp_path) == before
    (tmp_path / "inner" / "b.py").write_text("y = 2\n")
    assert sources_digest(tmp_path) != before


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, "elsewhere"])
def test_compiled_kernels_lie_in_the_cache_folder(tmp_path: Path, chosen: str | None) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    if chosen is not None:
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / chosen)
    code = "from lexshard.kernels.linear.cpu import multiply as m; print(m._cache.cache_path)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith(f"{tmp_path / (chosen or 'lexshard')}/kernels-")
