"""Certificates and guesses in responses: one of each output token, none lost, none repeated, none
unasked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import openai
import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.messages import Certificate, Commands, Request, SequenceEvent, TokenOrigin
from lexshard.cluster.engine.own_process import OwnEngines
from lexshard.cluster.engine.supervisor import EngineSupervisor
from tests.support.mock_engine import EOS, MockEngine, Script, certificate, ids, origin, spell
from tests.support.mock_server import (
    HELLO,
    Client,
    chat,
    complete,
    events,
    listening,
    post,
    says,
    serve,
    stream,
    until,
)

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": HELLO},
}


@dataclass(frozen=True)
class Detail:
    """``field`` of a request asks for it, ``told`` of a choice tells it: what the mock engine says
    of each token and its place in the output."""

    field: str
    told: str
    kind: type[Any]
    of: Callable[[int, int], Any]

    def expected(self, token_ids: Iterable[int]) -> list[dict[str, Any]]:
        return [asdict(self.of(token, i)) for i, token in enumerate(token_ids)]

    def streamed(self, chunks: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return [entry for each in choices if each["index"] == index for entry in each[self.told]]


CERTIFICATE = Detail("certificate", "certificates", Certificate, certificate)
DRAFT = Detail("draft", "drafts", TokenOrigin, lambda token, _: origin(token))
each_detail = pytest.mark.parametrize("detail", [CERTIFICATE, DRAFT], ids=lambda each: each.field)
each_path = pytest.mark.parametrize("path", BODIES)


@each_detail
def test_every_choice_tells_of_each_output_token(detail: Detail) -> None:
    engine = MockEngine(script=lambda request: spell(f"{request.choice}" * (request.choice + 2)))
    asks = {detail.field: True, "n": 3}
    for reply in (complete({**asks, "best_of": 3}, engine), chat(asks, engine)):
        for i, choice in enumerate(reply["choices"]):
            assert choice[detail.told] == detail.expected([*ids(f"{i}" * (i + 2)), EOS])
            assert set(choice[detail.told][0]) == {field.name for field in fields(detail.kind)}


@each_detail
def test_it_ends_where_the_output_does(detail: Detail) -> None:
    asks = {detail.field: True}
    cut = complete({**asks, "max_tokens": 3})["choices"][0]
    assert cut[detail.told] == detail.expected(ids("Hel"))
    # The engine has gone on in the same step; what came after the stop string is not output.
    engine = MockEngine(script=lambda _: Script([ids("one t"), ids("wo three")], hangs=True))
    reply = complete({**asks, "stop": "two"}, engine)
    assert reply["choices"][0][detail.told] == detail.expected(ids("one two"))
    assert reply["usage"]["completion_tokens"] == len("one two")


@each_detail
def test_an_echoed_prompt_has_none(detail: Detail) -> None:
    asks = {detail.field: True, "echo": True, "logprobs": 1}
    assert complete(asks)["choices"][0][detail.told] == detail.expected([*ids("Hello"), EOS])
    assert complete({**asks, "max_tokens": 0})["choices"][0][detail.told] == []


@each_path
@each_detail
def test_who_does_not_ask_is_not_told(path: str, detail: Detail) -> None:
    engine = MockEngine()
    for asked in ({}, {detail.field: False}, {detail.field: None}):
        body = {**BODIES[path], **asked}
        assert detail.told not in post(path, body, engine).text
        assert detail.told not in str(stream(path, body, engine))
    assert not any(getattr(request.parameters, detail.field) for request in engine.requests)
    refused = post(path, {**BODIES[path], detail.field: "yes"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, detail.field)


@each_path
@each_detail
@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"return_seed": True}])
@pytest.mark.parametrize("text", ["Hello", "aé漢🙂b", "", "stop at the end", "almost a", "🙂"])
def test_a_stream_tells_what_the_whole_response_tells(
    path: str, detail: Detail, extra: dict[str, Any], text: str
) -> None:
    """Also while text is held back: a character is incomplete, or a stop string may begin."""
    body = {**BODIES[path], detail.field: True, **extra, "n": 2, "stop": "at", "seed": 1}
    whole = post(path, body, says(text)).json()
    chunks = stream(path, body, says(text))
    expected = [*text.partition("at")[0].encode(), *(b"at" if "at" in text else [EOS])]
    assert len(whole["choices"]) == 2
    for choice in whole["choices"]:
        assert detail.streamed(chunks, choice["index"]) == choice[detail.told]
        assert choice[detail.told] == detail.expected(expected)
    assert len([chunk for chunk in chunks if "seed" in chunk]) == 2 * ("return_seed" in extra)


@each_path
def test_a_chunk_has_the_certificates_of_its_own_tokens(path: str) -> None:
    tokens = [*ids("aé漢b"), EOS]  # two a step: every character but the first is cut in two
    engine = MockEngine(script=lambda _: Script([tokens[i : i + 2] for i in range(0, 8, 2)]))
    asks_both = {**BODIES[path], "certificate": True, "return_token_ids": True}
    chunks = [chunk["choices"][0] for chunk in stream(path, asks_both, engine)]
    for piece in chunks:
        rows = [entry["rescored_rows"] for entry in piece["certificates"]]
        assert rows == list(piece.get("token_ids", []))
    assert sum(len(piece["certificates"]) > 0 for piece in chunks) == 4


class RecordedSide:
    """The way to an engine, as far as what is sent on it."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []

    def send(self, commands: Commands) -> None:
        self.submitted.extend(commands.submit)


def test_a_restart_of_the_engine_neither_loses_nor_repeats_certificates() -> None:
    client = EngineSupervisor(EngineConfiguration("mock"), OwnEngines("nowhere"))
    client._information = MockEngine().information
    client.health_reason = None

    def route(request: Request, text: str, begin: int, reason: Any = None) -> None:
        tokens = ids(text)
        told = tuple(certificate(token, begin + i) for i, token in enumerate(tokens))
        event = SequenceEvent(
            request.request_id, request.choice, tokens, finish_reason=reason, certificates=told
        )
        client._journal.record([event])

    async def die_and_go_on(http: Client) -> Any:
        first, second = RecordedSide(), RecordedSide()
        client._side = first  # type: ignore[assignment]
        body = {"prompt": "abc", "certificate": True, "stream": True, "max_tokens": 5}
        answer = asyncio.ensure_future(http.post("/v1/completions", json=body))
        await until(lambda: bool(first.submitted))
        [request] = first.submitted
        route(request, "abc", 0)
        client._side = None
        client._journal.count_death()
        client._side = second  # type: ignore[assignment]
        client._replay()
        [again] = second.submitted
        assert again.resumed_ids == ids("abc")
        assert again.parameters == request.parameters
        route(again, "d", 3)
        route(again, "e", 4, "length")
        return await answer

    chunks = events(serve(die_and_go_on, client))  # type: ignore[arg-type]
    assert CERTIFICATE.streamed(chunks) == CERTIFICATE.expected(ids("abcde"))


def test_the_openai_package_reads_certificates() -> None:
    expected = CERTIFICATE.expected([*ids("aé!"), EOS])
    asks: dict[str, Any] = {"model": "mock", "extra_body": {"certificate": True}}
    with (
        listening(says("aé!")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        creators: list[Any] = [client.completions.create, client.chat.completions.create]
        for create, body in zip(creators, BODIES.values(), strict=True):
            assert create(**asks, **body).choices[0].certificates == expected
            chunks = list(create(**asks, **body, stream=True))
            assert [e for chunk in chunks for e in chunk.choices[0].certificates] == expected
            assert not hasattr(create(model="mock", **body).choices[0], "certificates")


def test_the_fingerprint_tells_drafts_apart_where_tokens_depend_on_them() -> None:
    def fingerprint(**options: Any) -> str:
        reply = post("/v1/completions", {"prompt": "abc"}, **options)
        return str(reply.json()["system_fingerprint"])

    plain = fingerprint()
    assert fingerprint(draft="ngram") == plain
    by_distribution = {"draft": "ngram", "verify": "same-distribution"}
    exact = fingerprint(**by_distribution)
    assert exact != plain
    assert fingerprint(**by_distribution, draft_tokens=3) not in (exact, plain)


def test_the_fingerprint_tells_files_and_sums_apart_that_give_other_tokens() -> None:
    def fingerprint(body: str = "fused", dtype: str = "bfloat16", **told: Any) -> str:
        class Told(MockEngine):
            information = replace(MockEngine().information, body=body, dtype=dtype, **told)

        return str(complete({}, Told())["system_fingerprint"])

    def several(*of: str) -> int:
        return len({fingerprint(*of, processor=kind) for kind in ("AVX2", "AVX-512", "AMX")})

    assert fingerprint(files="a") != fingerprint(files="b")
    assert (several(), several("fused", "float32"), several("general")) == (2, 1, 3)
