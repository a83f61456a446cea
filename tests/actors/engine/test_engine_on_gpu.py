"""What an engine promises where it serves on a GPU: bfloat16, the certified head on the device.

- The head's tokens are those of all logits of the same hidden states, whatever the body computed.
- The body's hidden states may depend on the batch in their last bits, which now and then changes a
  token; steps of one fixed shape do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.row_table import RowNames, RowTable
from lexshard.loadtest.gpu.batch_dependence import batch_dependence
from tests.support.demo_engine import demo_engine

SEQUENCES, TOKENS = 12, 24
KINDS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8),
    SamplingParameters(temperature=0.9, top_k=40, top_p=0.9),
    SamplingParameters(temperature=0.7, min_p=0.05),
    SamplingParameters(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2),
    SamplingParameters(temperature=0.8, top_p=0.9),
)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_engine(device: str, dtype: str = "auto", **settings: Any) -> Engine:
    return demo_engine(device=device, dtype=dtype, head="certified", max_model_len=256, **settings)


def requests(count: int, tokens: int) -> list[Request]:
    random = np.random.default_rng(0)
    return [
        Request(
            f"r{i}",
            0,
            tuple(int(each) for each in random.integers(5, 16_000, 5 + 7 * (i % 4))),
            replace(KINDS[i % len(KINDS)], max_tokens=tokens, ignore_eos=True, seed=i),
        )
        for i in range(count)
    ]


def compare_decisions(engine: Engine) -> Counter[str]:
    """From now on the engine's head is asked twice per step, for the same hidden states: the second
    time every canonical logit is wanted, where the head is. Samplers decide from both; the engine
    goes on with the first, in turn. Counted are rows, those of another token, certified ones."""
    engine.steps.draws_ahead = False
    counts: Counter[str] = Counter()
    head, plane = engine._head, engine._plane
    screened, submit = head._decide, plane.submit
    dense: list[Candidates] = []

    def decide(hidden: torch.Tensor, rows: RowTable, *about: Any) -> Candidates:
        dense.append(screened(hidden, replace(rows, kinds=("dense",) * len(rows)), *about))
        return screened(hidden, rows, *about)

    def submit_both(step: int, names: RowNames, candidates: Candidates) -> Any:
        expected = submit(step, names, dense.pop()).result()
        found = submit(step, names, candidates).result()
        for ours, theirs, certificate in zip(found, expected, candidates.certificates, strict=True):
            assert ours is not None
            assert theirs is not None
            counts["rows"] += 1
            counts["different"] += ours.token_id != theirs.token_id
            counts["certified"] += certificate.guarantee != "dense"
        return submit(step, names, candidates)

    head._decide = decide  # type: ignore[method-assign]
    plane.submit = submit_both  # type: ignore[method-assign]
    return counts


def check_the_head_gives_the_tokens_of_all_logits(engine: Engine, count: int, tokens: int) -> None:
    counts = compare_decisions(engine)
    completions = run_to_completion(engine, requests(count, tokens))
    assert all(each.error is None for each in completions)
    assert counts["rows"] >= count * tokens
    assert counts["different"] == 0
    assert counts["certified"] > counts["rows"] / 2


@pytest.mark.slow
def test_the_head_gives_the_tokens_of_all_logits_here() -> None:
    """The comparison itself, where there is no GPU."""
    check_the_head_gives_the_tokens_of_all_logits(
        make_engine("cpu", threads=1, steps_at_once=1), 6, 4
    )


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_head_gives_the_tokens_of_all_logits_on_a_gpu(dtype: str) -> None:
    engine = make_engine("cuda", dtype=dtype)
    assert "on the GPU" in engine.information.head
    assert engine.information.accelerator
    check_the_head_gives_the_tokens_of_all_logits(engine, SEQUENCES, TOKENS)


@pytest.mark.gpu
@on_a_gpu
def test_few_tokens_depend_on_the_batch_in_bfloat16() -> None:
    """One in a few hundred is to be expected; `loadtest.gpu` measures how many."""
    found = batch_dependence(make_engine("cuda"), sequences=SEQUENCES, tokens=TOKENS)
    print(f"{found.different} of {found.compared} tokens depended on the batch")
    assert found.different <= found.compared / 20


@pytest.mark.gpu
@on_a_gpu
def test_no_token_depends_on_the_batch_where_steps_have_one_shape() -> None:
    engine = make_engine("cuda", batch_invariant=True)
    assert engine.information.batch_invariant
    found = batch_dependence(engine, sequences=SEQUENCES, tokens=TOKENS)
    assert (found.different, found.compared) == (0, SEQUENCES * TOKENS)


@pytest.mark.gpu
@on_a_gpu
def test_steps_begin_from_the_tokens_of_the_device_and_wait_for_nothing() -> None:
    """The tokens are those of steps in turn, and launching a step waits for nothing."""
    asked = [
        replace(each, parameters=KINDS[int(each.request_id[1:]) % 4]) for each in requests(8, 1)
    ]
    asked = [
        replace(each, parameters=replace(each.parameters, max_tokens=TOKENS, ignore_eos=True))
        for each in asked
    ]
    engine = make_engine("cuda", batch_invariant=True)
    assert engine.steps.draws_ahead
    engine.steps.draws_ahead = False
    expected = run_to_completion(engine, asked)  # makes the graphs, too
    engine.steps.draws_ahead = True
    follow, followed = engine.steps._follow, []

    def without_a_wait(begun: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            followed.append(follow(begun))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return followed[-1]

    engine.steps._follow = without_a_wait  # type: ignore[method-assign]
    assert run_to_completion(engine, asked) == expected
    assert sum(each is not None for each in followed) >= TOKENS - 4
    draws = engine.steps.device_draws
    assert draws.decided > 6 * TOKENS
    assert draws.wrong <= draws.decided / 50
