"""What an engine promises where it serves on a GPU: bfloat16, the certified head on the device.

- The head's tokens are those of all logits of the same hidden states, whatever the body computed.
- The body's hidden states may depend on the batch in their last bits, which now and then changes a
  token; steps of one fixed shape do not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.loadtest.gpu.batch_dependence import batch_dependence
from tests.support.compared_heads import compare_decisions
from tests.support.paths import DEMO

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


def make_engine(device: str, **settings: object) -> Engine:
    settings = {"device": device, "head": "certified", "max_model_len": 256, **settings}
    return Engine(EngineConfiguration(str(DEMO), **settings))  # type: ignore[arg-type]


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


def check_the_head_gives_the_tokens_of_all_logits(engine: Engine, count: int, tokens: int) -> None:
    comparison = compare_decisions(engine)
    completions = run_to_completion(engine, requests(count, tokens))
    assert all(each.error is None for each in completions)
    assert comparison.rows >= count * tokens
    assert comparison.different == 0
    assert comparison.certified > comparison.rows / 2


@pytest.mark.slow
def test_the_head_gives_the_tokens_of_all_logits_here() -> None:
    """The comparison itself, where there is no GPU."""
    check_the_head_gives_the_tokens_of_all_logits(make_engine("cpu", threads=1), 6, 4)


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
