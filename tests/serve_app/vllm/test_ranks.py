"""vLLM whose output head is cut across two tensor-parallel ranks, certified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.vllm_engines import DEMO, MISSING, PYTHON, PluginEngine, plugin_engine

pytestmark = pytest.mark.slow
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
MIXED: list[dict[str, Any]] = [
    {"max_tokens": 16, **own}
    for own in (
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_k": 12, "seed": 2},
        {"temperature": 1.0, "top_p": 0.7, "seed": 3},
        {"temperature": 1.2, "min_p": 0.05, "seed": 4},
        {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.3, "seed": 5},
        {"temperature": 1.0, "allowed_token_ids": list(range(8000, 8400)), "seed": 6},
        {"temperature": 0.8, "structured_outputs": {"regex": "( [a-z]{2,5}){3}"}, "seed": 7},
        {"temperature": 0.8, "logprobs": 2, "seed": 8},
        {"temperature": 0.0, "frequency_penalty": 0.5},
    )
]


def engines(plugin: bool, **arguments: Any) -> Iterator[PluginEngine]:
    if not PYTHON.exists():
        pytest.skip(MISSING)
    with plugin_engine(plugin=plugin, tensor_parallel_size=2, **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared() -> Iterator[PluginEngine]:
    yield from engines(plugin=True)


def assert_vllms_own(prompts: list[list[int]], ours: list[list[int]], **arguments: Any) -> None:
    """The greedy texts are those of vLLM, up to where its two best logits are a rounding apart."""
    for plain in engines(plugin=False, **arguments):
        theirs, found = plain.answers(prompts, {**GREEDY, "logprobs": 2})
    for own, other, at in zip(ours, theirs, found, strict=True):
        for token, vllms, scores in zip(own, other, at, strict=True):
            if token != vllms:  # what follows is of another text
                best, second = sorted((value for _, value, _ in scores), reverse=True)[:2]
                assert best - second < 1e-4
                break


def test_greedy_texts_are_those_of_vllm_with_two_ranks(
    shared: PluginEngine, prompts: list[list[int]]
) -> None:
    ours = shared.tokens(prompts, GREEDY)
    assert "left to vLLM" not in shared.counts()
    assert_vllms_own(prompts, ours)


def test_parts_may_begin_in_the_midst_of_a_block_and_end_with_padding(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    size = 16_290  # of which the first rank has 8,160: 127.5 blocks
    folder = copytree(DEMO, tmp_path / "cut")
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = json.dumps({**configuration, "vocab_size": size})
    (folder / "config.json").write_text(changed, encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    full = configuration["vocab_size"]
    cut = {name: each[:size] if len(each) == full else each for name, each in weights.items()}
    own = {name: each.contiguous() for name, each in cut.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    known = [[token % size for token in prompt] for prompt in prompts[:60]]
    for engine in engines(plugin=True, model=str(folder)):
        ours = engine.tokens(known, GREEDY)
        assert "left to vLLM" not in engine.counts()
    assert_vllms_own(known, ours, model=str(folder))


def test_a_seed_says_the_same_in_any_batch_and_all_of_it_is_certified(
    shared: PluginEngine, prompts: list[list[int]]
) -> None:
    own = prompts[: len(MIXED)]
    alone = [shared.tokens([prompt], [asked])[0] for prompt, asked in zip(own, MIXED, strict=True)]
    crowd = [{"temperature": 1.0, "max_tokens": 20}] * 9
    together = shared.tokens([*prompts[50:59], *own], [*crowd, *MIXED])
    assert together[9:] == alone
    assert "left to vLLM" not in shared.counts()


def test_ranks_draw_the_same_without_a_seed_and_beside_what_is_left_to_vllm(
    shared: PluginEngine, prompts: list[list[int]]
) -> None:
    """A rank that had drawn another token would have other keys and values in its half."""
    free = {"temperature": 1.5, "max_tokens": 24, "logprobs": 0}
    drawn, scores = shared.answers(prompts[:6], free)
    assert "left to vLLM" not in shared.counts()
    asked = [
        {"temperature": 0.0, "max_tokens": 1, "logprob_token_ids": [text[-1]]} for text in drawn
    ]
    histories = [[*prompt, *text[:-1]] for prompt, text in zip(prompts[:6], drawn, strict=True)]
    greedy = [GREEDY] * 6
    _, named = shared.answers([*histories, *prompts[:6]], [*asked, *greedy])
    for text, own, [at] in zip(drawn, scores, named[:6], strict=True):
        [value] = [value for token, value, _ in at if token == text[-1]]
        assert own[-1][0][1] == pytest.approx(value, abs=1e-3)
    counts = shared.counts()
    assert "left to vLLM: log-probabilities of named tokens" in counts
    assert " / " not in counts  # what is counted is the same on both ranks
