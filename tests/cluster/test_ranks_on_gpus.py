"""Ranks of a body on GPUs: what one GPU can show of them, and what two must."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

from lexshard.actors.body.loading import load
from lexshard.actors.body.self_test import BLOCKS, pack_batch, run_alone, run_mixed
from tests.support.paths import DEMO

TOKENS = [[3 + 7 * place for place in range(length)] for length in (14, 7, 19)]
TOLERANCE = 6e-2  # of the largest value, in bfloat16
GPUS = torch.cuda.device_count()


def differs(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value."""
    ours, theirs = torch.cat(found), torch.cat(expected)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def shared(ranks: int) -> Any:
    """The body of the demo on so many GPUs. Needs msgspec, which is not everywhere."""
    pytest.importorskip("msgspec")
    from lexshard.actors.body.parallel.loading import ParallelOptions, load_parallel
    from lexshard.cluster.ranks.processes import RankProcesses

    start = partial(RankProcesses, seconds=30.0)
    return load_parallel(DEMO, ParallelOptions(ranks, device="cuda"), start).body


def plain() -> list[torch.Tensor]:
    return run_alone(load(DEMO, device="cuda").body, TOKENS)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
def test_one_rank_computes_what_a_body_does() -> None:
    """In graphs, with layers compiled, as each rank does."""
    body = shared(1)
    body.allocate_cache(BLOCKS)
    body.record(8, 2)
    expected = plain()
    assert differs(run_mixed(body, TOKENS), expected) < TOLERANCE
    assert differs(run_alone(body, TOKENS), expected) < TOLERANCE
    assert "CUDA graphs" in body.description
    assert 0 < body.memory()[0] < body.memory()[1]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_compute_what_a_body_does_and_outlive_a_loss(ranks: int) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} CUDA devices")
    body = shared(ranks)
    expected = plain()
    assert differs(run_mixed(body, TOKENS), expected) < TOLERANCE
    assert differs(run_alone(body, TOKENS), expected) < TOLERANCE
    tables = [[0, 1], [2, 3], [4, 5]]
    begun = [(sequence, 0, len(tokens) - 1) for sequence, tokens in enumerate(TOKENS)]
    body.allocate_cache(BLOCKS)
    body.forward(pack_batch(TOKENS, begun, tables))
    os.kill(body.roles()[0].place.process_id, signal.SIGKILL)
    last = [(sequence, stop, stop + 1) for sequence, _, stop in begun]
    found = body.forward(pack_batch(TOKENS, last, tables))
    assert body.ranks_lost == 1
    assert differs([found], [torch.stack([each[-1] for each in expected])]) < TOLERANCE
    body.close()
