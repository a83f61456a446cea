"""How likely labels are: a softmax over their canonical rows alone, on any head and placement."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.body.loading import load
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.index.automatic import open_or_build
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.demo_engine import demo_engine
from tests.support.paths import DEMO
from tests.support.quick import quick

LABELS = (300, 17, 5000, 4, 999)
ASKED = SamplingParameters(
    temperature=0.0,
    allowed_ids=LABELS,
    labels=True,
    logprobs=len(LABELS),
    max_tokens=1,
    ignore_eos=True,
    certificate=True,
)


@pytest.mark.parametrize(
    "settings",
    quick(
        [
            {},
            {"head": "dense"},
            {"head": "paper"},
            {"samplers": 1, "sampler_placement": "processes"},
        ],
        {},
        {"head": "dense"},
    ),
    ids=str,
)
def test_labels_have_the_probabilities_they_have_among_themselves(
    prompt_ids: list[tuple[int, ...]], settings: dict[str, Any], tmp_path: Path
) -> None:
    if settings.get("head") == "paper":  # an index with clusters, not the demo's
        index = tmp_path / "index"
        open_or_build(DEMO, load(DEMO, "float32", device="cpu"), index, clusters=True)
        settings = {**settings, "index": str(index)}
    engine = demo_engine(max_model_len=128, **settings)
    try:
        prompts = [ids[:60] for ids in prompt_ids[:6]]
        requests = [Request(str(i), 0, prompt, ASKED) for i, prompt in enumerate(prompts)]
        found = run_to_completion(engine, requests)
        for prompt, completion in zip(prompts, found, strict=True):
            [told] = completion.logprobs
            assert sorted(token_id for token_id, _ in told.top) == sorted(LABELS)
            assert completion.token_ids == (told.top[0][0],)
            assert told.rank == 1
            assert math.isclose(sum(math.exp(logprob) for _, logprob in told.top), 1.0)
            singly = replace(ASKED, labels=False, logprobs=0)
            alone = [
                Request(f"{label}", 0, prompt, replace(singly, allowed_ids=(label,)))
                for label in LABELS
            ]
            whole = {
                each.token_ids[0]: each.logprobs[0].logprob
                for each in run_to_completion(engine, alone)
            }
            total = math.log(sum(map(math.exp, whole.values())))
            for token_id, logprob in told.top:
                assert math.isclose(logprob, whole[token_id] - total, abs_tol=1e-5)
        engine.check_idle()
    finally:
        engine.close()


def test_labels_are_named() -> None:
    engine = demo_engine(max_model_len=128)
    refusal = engine.submit(Request("a", 0, (1,), replace(ASKED, allowed_ids=None)))
    assert refusal is not None
    assert refusal.refused
    engine.close()
