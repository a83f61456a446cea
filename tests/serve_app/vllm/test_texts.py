"""vLLM with the certified head says what vLLM says, and a seed's text whatever runs beside it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.support.vllm_engines import MISSING, PYTHON, PluginEngine, plugin_engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
# A logit of this size has so many bits behind its point in bfloat16.
BITS = 8
DRAWS = 3000
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 12},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "all": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "tokens": {
        "temperature": 1.0,
        "allowed_token_ids": list(range(200, 400)),
        "logit_bias": {"300": 3.0},
    },
}
# Every kind of request, with seeds.
MIXED: list[dict[str, Any]] = [
    {**own, "seed": seed, "max_tokens": 20}
    for seed, own in enumerate(
        [
            *SETTINGS.values(),
            {"temperature": 0.8, "logprobs": 2},
            {"temperature": 0.8, "min_tokens": 5, "stop_token_ids": [16, 18], "ignore_eos": False},
            {"temperature": 0.8, "_bad_words_token_ids": [[16], [268, 1267]]},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ]
    )
]


def test_greedy_texts_of_200_prompts_are_those_of_vllm(
    certified: PluginEngine, plain: PluginEngine, prompts: list[list[int]]
) -> None:
    assert certified.tokens(prompts, GREEDY) == plain.tokens(prompts, GREEDY)
    assert "left to vLLM" not in certified.counts()


def test_greedy_texts_in_bfloat16_differ_only_where_vllm_rounds_two_logits_together(
    prompts: list[list[int]],
) -> None:
    if not PYTHON.exists():
        pytest.skip(MISSING)
    asked = {**GREEDY, "logprobs": 20}
    with plugin_engine(plugin=True, dtype="bfloat16") as engine:
        ours = engine.tokens(prompts, GREEDY)
    with plugin_engine(plugin=False, dtype="bfloat16", logprobs_mode="raw_logits") as engine:
        theirs, logits = engine.answers(prompts, asked)
    differing = 0
    for own, other, at in zip(ours, theirs, logits, strict=True):
        first = next((i for i in range(len(own)) if own[i] != other[i]), None)
        if first is None:
            continue
        differing += 1
        values = {token: value for token, value, _ in at[first]}
        best = values[other[first]]
        assert best - values[own[first]] <= 2.0 ** (np.floor(np.log2(abs(best))) - BITS + 1)
    assert differing < len(prompts) / 2


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_are_distributed_as_those_of_vllm(
    name: str, certified: PluginEngine, plain: PluginEngine, prompts: list[list[int]]
) -> None:
    def draws(engine: PluginEngine) -> list[int]:
        parameters = [{**SETTINGS[name], "seed": seed, "max_tokens": 1} for seed in range(DRAWS)]
        return [ids[0] for ids in engine.tokens([prompts[7]] * DRAWS, parameters)]

    ours, theirs = (np.bincount(draws(each), minlength=16_384) for each in (certified, plain))
    often = ours + theirs >= 10
    table = np.array([[*counts[often], counts[~often].sum()] for counts in (ours, theirs)])
    table = table[:, table.sum(axis=0) > 0]
    assert table.shape[1] > 3
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_a_seed_says_the_same_in_any_batch(
    certified: PluginEngine, prompts: list[list[int]]
) -> None:
    own = prompts[: len(MIXED)]
    alone = [
        certified.tokens([prompt], [parameters])[0]
        for prompt, parameters in zip(own, MIXED, strict=True)
    ]
    assert certified.tokens(own, MIXED) == alone
    order = list(range(len(MIXED)))
    random.Random(3).shuffle(order)
    crowd = [{"temperature": 1.0, "max_tokens": 30}] * 20
    together = certified.tokens(
        [*prompts[50:70], *(own[each] for each in order)],
        [*crowd, *(MIXED[each] for each in order)],
    )
    assert [together[20 + order.index(each)] for each in range(len(MIXED))] == alone


def test_what_is_left_to_vllm_takes_nothing_from_the_others(
    certified: PluginEngine, prompts: list[list[int]]
) -> None:
    asked = {"temperature": 0.9, "seed": 5, "max_tokens": 12, "logprobs": 5}
    [alone] = certified.tokens(prompts[:1], [asked])
    named = {"temperature": 0.9, "seed": 6, "max_tokens": 12, "logprob_token_ids": [5, 6]}
    together, found = certified.answers(prompts[:2], [asked, named])
    assert together[0] == alone
    assert len(together[1]) == 12
    assert [{i for i, _, _ in at} >= {5, 6} for at in found[1]] == [True] * 12
    assert "left to vLLM: log-probabilities of named tokens" in certified.counts()


def test_log_probabilities_are_those_of_vllm(
    certified: PluginEngine, plain: PluginEngine, prompts: list[list[int]]
) -> None:
    asked = {"temperature": 0.0, "max_tokens": 8, "logprobs": 4}
    ours, theirs = (each.answers(prompts[:8], asked) for each in (certified, plain))
    assert ours[0] == theirs[0]
    for own, other in zip(ours[1], theirs[1], strict=True):
        for at, there in zip(own, other, strict=True):
            assert [(i, rank) for i, _, rank in at] == [(i, rank) for i, _, rank in there]
            assert [p for _, p, _ in at] == pytest.approx([p for _, p, _ in there], abs=1e-4)


def test_structured_output_is_what_vllm_says(
    certified: PluginEngine, plain: PluginEngine, prompts: list[list[int]]
) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": False}
    parameters = [
        {**greedy, "structured_outputs": {"regex": "( [a-z]{2,5}){3}"}},
        {**greedy, "structured_outputs": {"choice": [" yes", " no", " perhaps"]}},
        {
            **greedy,
            "structured_outputs": {"regex": "[0-9]{4}"},
            "allowed_token_ids": list(range(300)),
        },
        greedy,
        {**greedy, "structured_outputs": {"regex": "[0-9]{4}"}, "logprobs": 2},
    ]
    ours, theirs = (each.answers(prompts[:5], parameters) for each in (certified, plain))
    assert ours[0] == theirs[0]
    for at, there in zip(ours[1][4], theirs[1][4], strict=True):
        assert [p for _, p, _ in at] == pytest.approx([p for _, p, _ in there], abs=1e-3)


def test_guesses_change_no_text(certified: PluginEngine, prompts: list[list[int]]) -> None:
    """Every guess is verified by drawing what follows: drafted or not, a seed says the same, under
    grammars, too."""
    refused = {"min_p", "logit_bias"}  # by vLLM, where there are guesses
    held = [
        {"temperature": 0.8, "seed": 5, "max_tokens": 16, "structured_outputs": {"regex": regex}}
        for regex in ("( [a-z]{2,5}){3}", "(the ){8}", "[0-9]{4}")
    ]
    free = [*(each for each in MIXED if not refused & each.keys()), GREEDY]
    parameters = [free[0], held[0], *free[1:], *held[1:]]
    own = [[*each, *each, *each] for each in prompts[: len(parameters)]]
    without = certified.tokens(own, parameters)
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with plugin_engine(plugin=True, speculative_config=ngram) as engine:
        assert engine.tokens(own, parameters) == without
        assert "left to vLLM" not in engine.counts()


def test_prompts_in_chunks_change_no_text(
    certified: PluginEngine, prompts: list[list[int]]
) -> None:
    own = prompts[100 : 100 + len(MIXED)]
    with plugin_engine(plugin=True, max_num_batched_tokens=64) as engine:
        assert engine.tokens(own, MIXED) == certified.tokens(own, MIXED)


def test_a_layer_of_lora_is_left_to_vllm(plain: PluginEngine, prompts: list[list[int]]) -> None:
    with plugin_engine(plugin=True, enable_lora=True, max_lora_rank=8) as engine:
        assert engine.tokens(prompts[:4], GREEDY) == plain.tokens(prompts[:4], GREEDY)
        assert "left to vLLM: every step: models with LoRA adapters" in engine.counts()
