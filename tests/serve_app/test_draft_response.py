"""Which tokens of a response were guessed: told per token, to who asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.mock_engine import EOS, MockEngine, Script, ids, origin, spell
from tests.support.mock_server import HELLO, chat, complete, post, stream

ASKS = {"draft": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": HELLO},
}


def told_of(token_ids: Iterable[int]) -> list[dict[str, Any]]:
    """What the mock engine says of an output, as JSON."""
    return [asdict(origin(token)) for token in token_ids]


def told(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [entry for choice in choices for entry in choice["drafts"]]


def test_every_choice_tells_of_each_output_token() -> None:
    engine = MockEngine(script=lambda request: spell(f"{request.choice}" * (request.choice + 2)))
    for reply in (complete({**ASKS, "n": 2, "best_of": 2}, engine), chat({**ASKS, "n": 2}, engine)):
        for i, choice in enumerate(reply["choices"]):
            assert choice["drafts"] == told_of([*ids(f"{i}" * (i + 2)), EOS])
            assert set(choice["drafts"][0]) == {"drafted_by", "rejected"}


def test_nothing_is_told_of_what_came_after_a_stop_string() -> None:
    engine = MockEngine(script=lambda _: Script([ids("one t"), ids("wo three")], hangs=True))
    reply = complete({**ASKS, "stop": "two"}, engine)
    assert reply["choices"][0]["drafts"] == told_of(ids("one two"))


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_tells_it_with_the_tokens(path: str) -> None:
    assert told(stream(path, {**BODIES[path], **ASKS})) == told_of([*ids("Hello"), EOS])


@pytest.mark.parametrize("path", BODIES)
def test_who_does_not_ask_is_not_told_and_what_is_no_boolean_is_refused(path: str) -> None:
    for fields in ({}, {"draft": False}, {"draft": None}):
        assert "drafts" not in post(path, {**BODIES[path], **fields}).text
        assert "drafts" not in str(stream(path, {**BODIES[path], **fields}))
    assert post(path, {**BODIES[path], "draft": "yes"}).status_code == 400


def test_the_fingerprint_tells_drafts_apart_where_tokens_depend_on_them() -> None:
    def fingerprint(**options: Any) -> str:
        reply = post("/v1/completions", {"prompt": "abc"}, **options)
        return str(reply.json()["system_fingerprint"])

    plain = fingerprint()
    assert fingerprint(draft="ngram") == plain
    exact = fingerprint(draft="ngram", verify="same-distribution")
    assert exact != plain
    assert fingerprint(draft="ngram", verify="same-distribution", draft_tokens=3) not in (
        exact,
        plain,
    )
