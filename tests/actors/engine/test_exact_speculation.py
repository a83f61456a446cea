"""Guesses tested by distributions in the engine: what is said has the target's own law."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from lexshard.actors.drafter.build import build_drafter
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.constraints import Constraints
from lexshard.actors.engine.speculation import CostTiming
from lexshard.actors.grammar import step_masks
from lexshard.actors.grammar.matcher import Matcher
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.proposal import Proposal
from lexshard.actors.text.token_bytes import TokenBytes
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.speculation_cases import Says, drafting_engine, requests_of, run_and_close

FALSE_ALARM = 1e-4  # of each statistical check; seeds are fixed
CHOICES = 4  # tokens that each place has
EXACT: dict[str, Any] = {"verify": "same-distribution", "draft": str(DEMO_DRAFT)}
DRAFTERS: dict[str, dict[str, Any]] = {
    "static head": EXACT,
    "full head": {**EXACT, "draft_head": "full", "draft_tokens": 3},
    "stepping": {**EXACT, "draft_length": "stepping"},
    "look-up": {"verify": "same-distribution", "draft": "ngram"},
    "samplers": {**EXACT, "samplers": 2},
}
DENSE = {"head": "dense"}
Laws = dict[tuple[int, ...], dict[int, float]]
LETTERS = "start: /[ a-m]{200}[a-z ]*/"
PARAMETERS = SamplingParameters(temperature=1.1, top_k=CHOICES, max_tokens=5, ignore_eos=True)

# What bounds may decide.
WITHOUT_TRUNCATION = (
    SamplingParameters(temperature=0.9),
    SamplingParameters(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParameters(temperature=1.1, logit_bias=((5, 2.0),), bad_words=((11,),)),
)


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt(target: Any, prompt_ids: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Said twice, with what is most likely to follow, so that looking it up finds something."""
    said = torch.tensor([prompt_ids[3][:20]])
    with torch.inference_mode():
        followed = target.generate(said, max_new_tokens=6, do_sample=False)
    return (*followed[0].tolist(), *prompt_ids[3][:20])


@pytest.fixture(scope="module")
def laws(target: Any, prompt: tuple[int, ...]) -> Laws:
    return laws_of(target, prompt)


def laws_of(target: Any, prompt: tuple[int, ...], allowed: Sequence[int] | None = None) -> Laws:
    """What the target says after the prompt and any chain of up to three tokens it may say, all of
    which are ``allowed``."""
    found: Laws = {}
    chains: list[tuple[int, ...]] = [()]
    for _ in range(4):
        ids = torch.tensor([[*prompt, *chain] for chain in chains])
        with torch.inference_mode():
            logits = target(ids).logits[:, -1].double() / PARAMETERS.temperature
        for chain, row in zip(chains, logits, strict=True):
            if allowed is not None:
                row = torch.full_like(row, -torch.inf).index_copy(0, *columns_of(row, allowed))
            best = row.topk(CHOICES)
            shares = best.values.softmax(0).tolist()
            found[chain] = dict(zip(best.indices.tolist(), shares, strict=True))
        chains = [(*chain, token) for chain in chains for token in found[chain]]
    return found


def columns_of(row: torch.Tensor, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.tensor(ids)
    return places, row[places]


@cache
def of_letters() -> list[int]:
    """The tokens that `LETTERS` allows, as long as it has not all of its letters."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    spelled = TokenBytes(tokenizer, skip_special_tokens=True)
    return [each for each in range(len(tokenizer)) if re.fullmatch(rb"[ a-m]+", spelled[each])]


def requests(prompt: tuple[int, ...], count: int, **changes: Any) -> list[Request]:
    return [
        Request(str(seed), 0, prompt, replace(PARAMETERS, seed=seed, **changes))
        for seed in range(count)
    ]


def check_law(laws: Laws, chains: list[tuple[int, ...]]) -> None:
    """Chi-square over all chains of four; those that are rare count together."""
    first = list(laws[()])
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        cells = {
            (*chain, token): share * chance
            for chain, share in cells.items()
            for token, chance in laws[chain].items()
        }
    assert {chain[0] for chain in cells} == set(first)
    observed = dict.fromkeys(cells, 0)
    for chain in chains:
        observed[chain] += 1  # a KeyError is a token that top-k leaves out
    expected = {chain: len(chains) * share for chain, share in cells.items()}
    common = [chain for chain in cells if expected[chain] >= 5]
    rare = [chain for chain in cells if expected[chain] < 5]
    counts = [observed[chain] for chain in common] + [sum(observed[chain] for chain in rare)]
    wanted = [expected[chain] for chain in common] + [sum(expected[chain] for chain in rare)]
    assert stats.chisquare(counts, wanted).pvalue > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("static head", 800),
        *(pytest.param(name, 8_000, marks=pytest.mark.slow) for name in DRAFTERS),
    ],
)
def test_chains_follow_the_target(
    laws: Laws,
    prompt: tuple[int, ...],
    name: str,
    count: int,
) -> None:
    """One seed each, 64 at a time, at different places of their chains."""
    engine = drafting_engine(**DRAFTERS[name])
    completions = run_and_close(engine, requests(prompt, count))
    statistics = engine.statistics()
    assert statistics.draft_tokens > statistics.draft_accepted_tokens > 0.05 * count
    check_law(laws, [completion.token_ids[:4] for completion in completions])


def either(tokens: tuple[int, int]) -> Says:
    """A drafter that guesses one of two tokens."""
    random, ids = np.random.default_rng(5), np.array(tokens, np.int32)
    source = Proposal(ids, np.zeros(2, np.float32), 1.0)
    return Says(lambda task: Draft([int(random.choice(ids))], [source]))


@pytest.mark.parametrize(
    "elsewhere",
    [{}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"samplers": 2}, DENSE))],
)
def test_chains_follow_the_target_under_a_grammar(
    target: Any, prompt: tuple[int, ...], elsewhere: dict[str, Any]
) -> None:
    """Which refuses half of what is guessed: what the drafter gave that goes to others as the
    target has them, and not to those that it guesses, too, once more."""
    check_law(*letters_of(target, prompt, 1_000, **elsewhere))


def test_late_masks_change_no_law(
    target: Any, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guess whose masks were waited for is tested when they are there; those behind a guess
    that is refused never take long."""
    masks, take, late = Matcher.masks, Constraints.take, []

    def slow(matcher: Matcher, guesses: Sequence[int]) -> Any:
        if guesses:
            time.sleep(0.1 * (guesses[0] in of_letters()))
        return masks(matcher, guesses)

    def noted(constraints: Constraints, plan: Any, broken: Any) -> Any:
        found = take(constraints, plan, broken)
        late.append(len(found))
        return found

    monkeypatch.setattr(step_masks, "THREADS", 64)  # none waits for another one's
    monkeypatch.setattr(Matcher, "masks", slow)
    monkeypatch.setattr(Constraints, "take", noted)
    check_law(*letters_of(target, prompt, 1_000))
    assert sum(late) > 500


def letters_of(
    target: Any, prompt: tuple[int, ...], count: int, **settings: Any
) -> tuple[Laws, list[tuple[int, ...]]]:
    """The law of `LETTERS`, and what is said by an engine that guesses one of its letters or what
    it refuses."""
    asked, allowed = replace(PARAMETERS, ignore_eos=False, grammar=LETTERS), of_letters()
    laws = laws_of(target, prompt, allowed)
    likely = max(laws[()], key=lambda token: sum(laws[first,].get(token, 0) for first in laws[()]))
    refused = next(token for token in range(500, 16_000) if token not in allowed)
    drafting = {"verify": "same-distribution", "draft_tokens": 1, **settings}
    engine = drafting_engine(either((likely, refused)), **drafting)
    some = [Request(str(seed), 0, prompt, replace(asked, seed=seed)) for seed in range(count)]
    said = run_and_close(engine, some)
    assert engine.statistics().draft_accepted_tokens > 0.02 * count
    return laws, [each.token_ids[:4] for each in said]


@pytest.mark.slow
def test_the_check_has_teeth(laws: Laws, prompt: tuple[int, ...]) -> None:
    """Without a test every guess would stand: what another temperature draws is noticed."""
    completions = run_and_close(drafting_engine(), requests(prompt, 1500, temperature=1.4))
    with pytest.raises(AssertionError):
        check_law(laws, [completion.token_ids[:4] for completion in completions])


def overlap_of(p: np.ndarray, q: np.ndarray) -> float:
    """``1 - TV(p, q)``: no way to test guesses lets more of them stand."""
    return float(np.minimum(p, q).sum())


def coupling_of(p: np.ndarray, q: np.ndarray) -> float:
    """How often both draw the same token with the same Gumbel noise: token ``i`` with probability
    ``1 / sum_j max(p_j / p_i, q_j / q_i)``."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return float(sum(1.0 / np.maximum(p / p[i], q / q[i]).sum() for i in both))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verify", "formula"), [("same-distribution", overlap_of), ("same-token", coupling_of)]
)
def test_guesses_stand_as_often_as_the_formula_says(
    laws: Laws,
    prompt: tuple[int, ...],
    verify: str,
    formula: Callable[[np.ndarray, np.ndarray], float],
) -> None:
    """On the average over the first tokens, within 4 standard errors (6e-5)."""
    engine = drafting_engine(**{**EXACT, "verify": verify}, draft_tokens=1)
    count = 1000
    run_to_completion(engine, requests(prompt, count, max_tokens=3))
    drafter = build_drafter(
        engine.configuration, blocks=64, vocabulary_size=engine.model.vocabulary_size
    )
    expected = 0.0
    for token, share in laws[()].items():
        task = DraftTask(
            0,
            [*prompt, token],
            1,
            7,
            1 / PARAMETERS.temperature,
            propose=True,
            top_k=PARAMETERS.top_k,
            top_p=PARAMETERS.top_p,
        )
        [draft] = drafter.propose([task])
        [proposal] = draft.proposals
        scores = proposal.logits.astype(np.float64) / PARAMETERS.temperature
        q = np.exp(scores - scores.max())
        q /= q.sum()
        p = np.array([laws[(token,)].get(each, 0.0) for each in proposal.ids.tolist()])
        expected += share * formula(p, q)
    statistics = engine.statistics()
    engine.close()
    tested = statistics.draft_tokens  # one that is not caught up with in time gets no guess
    assert tested > count / 4
    error = np.sqrt(expected * (1 - expected) / tested)
    assert abs(statistics.draft_accepted_tokens / tested - expected) < 4 * error


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_alone_or_among_others(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """Every control, samplers anywhere; greedy ones say what they say without guesses."""
    some = requests_of(prompt_ids, 8)
    together = run_and_close(drafting_engine(**EXACT), some)
    assert run_and_close(drafting_engine(**EXACT, samplers=2), some) == together
    alone = drafting_engine(**EXACT)
    for request, completion in zip(some, together, strict=True):
        assert run_to_completion(alone, [request]) == [completion]
    alone.close()
    plain = run_and_close(drafting_engine(), some)
    greedy = [request.parameters.temperature == 0 for request in some]
    assert [a for a, chosen in zip(together, greedy, strict=True) if chosen] == [
        a for a, chosen in zip(plain, greedy, strict=True) if chosen
    ]
    assert together != plain


def test_where_a_step_ends_within_a_prompt_says_nothing_of_its_first_token(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """One whose last step has a single token of its prompt could be drafted for at once."""
    some = [
        Request(str(number), 0, prompt_ids[number][:33], replace(PARAMETERS, seed=number))
        for number in range(12)
    ]
    said = []
    for step_tokens in (32, 512):
        engine = drafting_engine(**EXACT, step_tokens=step_tokens, prefix_cache=False)
        said.append([run_to_completion(engine, [each])[0].token_ids for each in some])
        engine.close()
    assert said[0] == said[1]


def test_a_neighbour_that_rests_is_no_reason_not_to_guess(
    prompt_ids: list[tuple[int, ...]],
) -> None:
    """For a greedy text, whose guesses go by the clock, they do not pay; a step leaves one token of
    the other's prompt, which is not yet guessed for. Its text is the one it says alone."""
    greedy = replace(PARAMETERS, temperature=0.0, max_tokens=80)
    neighbour = Request("greedy", 0, prompt_ids[1][:9], greedy)
    other = Request("drawn", 0, prompt_ids[0][:16], replace(PARAMETERS, max_tokens=40, seed=3))
    texts = []
    for beside in (False, True):
        engine = drafting_engine(**EXACT, draft_length="auto", step_tokens=16, prefix_cache=False)
        assert engine._speculation is not None
        dear = [CostTiming("step", rows, 1e-3 * rows) for rows in (1, 2, 16)]
        engine._speculation.restart([*dear, CostTiming("drafting", 1, 1.0)])
        if beside:
            engine.submit(neighbour)
            for _ in range(4):
                engine.step()
        engine.submit(other)
        said: list[int] = []
        for _ in range(200):
            own = [event for event in engine.step() if event.request_id == "drawn"]
            said += [token for event in own for token in event.token_ids]
        assert len(said) == 40
        texts.append(said)
        engine.close()
    assert texts[0] == texts[1]


def test_bounds_decide_what_all_logits_decide(
    prompt_ids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token; and they decide, so that little of the vocabulary is opened."""
    kinds = [replace(WITHOUT_TRUNCATION[number % 3], seed=number) for number in range(8)]
    some = [
        Request(
            str(number), 0, prompt_ids[number][:40], replace(kind, max_tokens=12, ignore_eos=True)
        )
        for number, kind in enumerate(kinds)
    ]
    opened = []
    said = []
    for worth_it in (True, False):
        if not worth_it:
            monkeypatch.setattr(Shard, "_worth_testing", lambda *_: False)
        engine = drafting_engine(**EXACT)
        said.append(run_to_completion(engine, some))
        statistics = engine.statistics()
        opened.append(statistics.head_opened_share / statistics.head_rows)
        engine.close()
    assert said[0] == said[1]
    assert opened[0] < 0.3 * opened[1]


@pytest.mark.parametrize("verify", ["same-distribution", "sigmoid"])
def test_sequences_that_give_up_their_blocks_go_on(
    prompt_ids: list[tuple[int, ...]], verify: str
) -> None:
    room = 12 * 16 * 4 * 4096
    engine = drafting_engine(**{**EXACT, "verify": verify}, kv_cache_bytes=room)
    some = requests_of(prompt_ids, 24)
    completions = run_and_close(engine, some)
    assert [len(each.token_ids) > 0 for each in completions] == [True] * len(some)


def test_lengths_do_not_go_by_the_clock_where_tokens_depend_on_them() -> None:
    with pytest.raises(ValueError, match="take --draft-length stepping or fixed"):
        drafting_engine(**EXACT, draft_length="measured")


def test_sigmoids_are_not_for_drafters_that_are_certain() -> None:
    with pytest.raises(ValueError, match="draft model"):
        drafting_engine(draft="ngram", verify="sigmoid")
    with pytest.raises(ValueError, match="must be below 0"):
        drafting_engine(**{**EXACT, "verify": "sigmoid"}, sigmoid_alpha=3.0)
    with pytest.raises(ValueError, match="add --verify sigmoid"):
        drafting_engine(**EXACT, sigmoid_beta=3.0)
