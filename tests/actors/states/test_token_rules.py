"""What a request says of tokens is prepared once, and costs a row what its own text matches."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.sequence_state import SequenceState, SequenceStates
from lexshard.actors.states.token_rules import TokenRules

SIZE, EOS = 1000, (0,)
TOKENS = st.lists(st.integers(0, 3), max_size=7).map(tuple)


@given(phrases=st.lists(TOKENS, max_size=12), history=TOKENS, drafted=TOKENS, early=st.booleans())
def test_what_would_complete_a_phrase_is_banned(
    phrases: list[tuple[int, ...]], history: tuple[int, ...], drafted: tuple[int, ...], early: bool
) -> None:
    """And a phrase of one token always, the end of a text as long as it is early."""
    parameters = SamplingParameters(bad_words=tuple(phrases), stop_token_ids=(77,))
    text = (*history, *drafted)
    expected = {
        phrase[-1]
        for phrase in phrases
        if phrase and (len(phrase) == 1 or text[1 - len(phrase) :] == phrase[:-1])
    }
    expected |= {*EOS, 77} if early else set()
    banned = TokenRules(parameters, SIZE, EOS).banned(list(history), drafted, early=early)
    assert banned.tolist() == sorted(expected)


@pytest.mark.timed
def test_thousands_of_phrases_cost_a_row_no_more_than_a_few() -> None:
    """2,000 phrases of which none fits took a row half a millisecond, at 63 rows of a step 30."""
    phrases = tuple((3, token, token + 1) for token in range(1, 2001))
    rules = TokenRules(SamplingParameters(bad_words=phrases), SIZE, EOS)
    history = [3, 5] * 500
    started = time.perf_counter()
    for _ in range(2000):
        assert rules.banned(history, (), early=False).tolist() == [6]
    assert time.perf_counter() - started < 0.5


def test_choices_share_what_their_request_says_of_tokens() -> None:
    """Whether they come as one object or as equal ones, as they do to a sampler elsewhere."""
    states = SequenceStates(SIZE, EOS, 4)
    adjustments = []
    for choice in range(4):
        parameters = SamplingParameters(allowed_ids=tuple(range(5, 900, 3)), seed=choice // 2)
        state = states.open(choice, Request("a", choice, (1,), parameters))
        adjustments.append(state.adjustment())
    assert len({each.mask for each in adjustments if each is not None}) == 1
    other = states.open(9, Request("b", 0, (1,), SamplingParameters(allowed_ids=(7, 5, 7))))
    adjustment = other.adjustment()
    assert adjustment is not None
    assert adjustment.mask is not None
    assert adjustment.mask.ids.tolist() == [5, 7]


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": ((5, 1e39),)},
        {"logit_bias": ((5, float("nan")),)},
        {"repetition_penalty": 1e-46},
        {"repetition_penalty": 1e39},
        {"presence_penalty": float("inf")},
        {"temperature": 1e46},
    ],
)
def test_numbers_that_fp32_does_not_have_are_refused(wrong: dict[str, Any]) -> None:
    """A search has no place for what they make of a logit."""
    request = Request("a", 0, (1, 2), SamplingParameters(**wrong))
    with pytest.raises(ValueError, match=r"out of range|not finite"):
        SequenceState(request, SIZE, EOS)
