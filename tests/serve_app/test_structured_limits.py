"""Hostile grammars: each is refused, or let through, in its time, and the next is served."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.structured.compiling import Compiled, GrammarCompiler
from lexshard.serve_app.structured.constraint import MAX_TEXT_BYTES
from tests.support.hostile_grammars import HARMLESS, HOSTILE, random_schema
from tests.support.mock_engine import VOCABULARY, MockEngine
from tests.support.mock_server import HELLO, TOKENIZER, Client, says, serve

# By the clock, of half a second of a core that ten others want.
SECONDS = 20.0
ME = "a client"
GOOD = 'start: "a" | "b"'


def outcomes(
    texts: list[str], compiler: GrammarCompiler | None = None, size: int = VOCABULARY
) -> list[Compiled]:
    compiler = compiler or GrammarCompiler(TOKENIZER)
    information = replace(MockEngine().information, vocabulary_size=size)

    async def run() -> list[Compiled]:
        never = asyncio.Event()
        await compiler.compiled(GOOD, "f", information, never.wait, ME)  # it starts with the first
        found = []
        for text in texts:
            began = time.monotonic()
            found.append(await compiler.compiled(text, "f", information, never.wait, ME))
            assert time.monotonic() - began < SECONDS, text[:200]
        return found

    try:
        return asyncio.run(run())
    finally:
        compiler.close()


def test_hostile_grammars_are_refused_and_the_next_is_served() -> None:
    found = dict(zip(HOSTILE, outcomes([*HOSTILE.values(), GOOD])[:-1], strict=True))
    assert [name for name, outcome in found.items() if outcome.error is None] == []
    slow, large = "it takes too long to compile", "it takes too much memory to compile"
    assert found["memory"].error in (large, slow)  # on a busy machine time ends first
    assert {found[name].error for name in found if name.startswith("time")} == {slow}
    assert found["depth of rules"].error == "it is nested too deeply"


def test_what_only_looks_hostile_is_compiled() -> None:
    for name, outcome in zip(HARMLESS, outcomes([*HARMLESS.values()]), strict=True):
        assert outcome.error is None, name


def test_what_came_of_a_grammar_is_remembered() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    first = outcomes([GOOD, "start: ["], compiler)

    async def again() -> list[Compiled]:
        never = asyncio.Event()
        information: Any = None  # no process would start with it
        return [
            await compiler.compiled(text, "f", information, never.wait, ME)
            for text in (GOOD, "start: [")
        ]

    assert asyncio.run(again()) == first


def test_a_process_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TOKENIZER)
    outcomes([GOOD], compiler)
    assert outcomes(['start: "c"'], compiler) == [Compiled(None)]

    async def broken() -> None:
        never = asyncio.Event()
        information = MockEngine().information
        await compiler.compiled('start: "d"', "f", information, never.wait, ME)
        process = compiler._process
        assert process is not None
        process.kill()
        process.wait()
        again = await compiler.compiled('start: "e"', "f", information, never.wait, ME)
        assert again.error is None
        with monkeypatch.context() as impatient:
            impatient.setattr("lexshard.serve_app.structured.compiling.PATIENCE_SECONDS", 0)
            with pytest.raises(ApiError) as failed:
                await compiler.compiled('start: "f"', "f", information, never.wait, ME)
        assert failed.value.status == 503
        # What the first comes to is not taken for what comes of another.
        none = await compiler.compiled("start: g", "f", information, never.wait, ME)
        assert none.error is not None

    asyncio.run(broken())
    compiler.close()


def test_a_process_of_more_files_than_select_knows_has_grammars() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("a process may open too few files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            held.enter_context(open(os.devnull, "rb"))
        assert outcomes([GOOD]) == [Compiled(None)]


def test_the_process_ends_with_its_peer() -> None:
    for killed in (False, True):
        compiler = GrammarCompiler(TOKENIZER)
        assert outcome_of_one(GOOD, compiler) == Compiled(None)
        process = compiler._process
        assert process is not None
        assert process.stdin is not None
        copies = [waiting_copy(process.pid)]
        if killed:
            process.kill()
        else:
            process.stdin.close()  # as the kernel does for a peer that was killed
        assert process.wait(10) == (-signal.SIGKILL if killed else 0)
        assert psutil.wait_procs(copies, 10)[1] == []


def test_a_copy_that_the_kernel_ended_refuses_no_grammar() -> None:
    compiler = GrammarCompiler(TOKENIZER)
    assert outcome_of_one(GOOD, compiler) == Compiled(None)
    assert compiler._process is not None
    copy = waiting_copy(compiler._process.pid)
    copy.kill()
    while copy.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    assert outcome_of_one('start: "c"', compiler) == Compiled(None)
    compiler.close()


def outcome_of_one(text: str, compiler: GrammarCompiler) -> Compiled:
    """What comes of a grammar, after which ``compiler`` is still open."""
    information, never = MockEngine().information, asyncio.Event()
    return asyncio.run(compiler.compiled(text, "f", information, never.wait, ME))


def waiting_copy(process_id: int) -> psutil.Process:
    """The process that waits for the next grammar of this one."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        copies = psutil.Process(process_id).children()
        if [copy.status() for copy in copies] == [psutil.STATUS_SLEEPING]:
            return copies[0]
        time.sleep(0.02)
    raise TimeoutError("no process waits for a grammar")


def nested_tokens(longest: int) -> str:
    """A tokenizer whose tokens are one letter, two of it, and so on: at 1,024 llguidance panics."""
    runs = ["a" * length for length in range(1, longest + 1)]
    merges = [(run, "a") for run in runs[:-1]]
    tokenizer = Tokenizer(models.BPE(vocab={run: i for i, run in enumerate(runs)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


@pytest.mark.parametrize("described", ["{}", nested_tokens(1_100)])
def test_a_tokenizer_that_llguidance_cannot_read_is_told_of(described: str) -> None:
    class Strange(ModelTokenizer):
        def json(self) -> str:
            return described

    found = outcomes([GOOD], GrammarCompiler(Strange(TOKENIZER._tokenizer)), size=1_100)
    assert str(found[0].error).startswith("no grammar can be held with this model's tokenizer")


def test_a_long_grammar_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ApiError) as refused:
        outcomes(["start: " + " " * MAX_TEXT_BYTES])
    assert (refused.value.status, refused.value.parameter) == (400, "f")


def test_random_schemas_are_answered_by_200_or_400() -> None:
    """Schemas of the wrong shape everywhere, with names and values that mean something."""
    chance = random.Random(7)

    async def check(client: Client) -> None:
        for _ in range(300):
            schema = random_schema(chance)
            form = {"name": "x", "schema": schema, "strict": chance.random() < 0.5}
            body = {
                "messages": HELLO,
                "response_format": {"type": "json_schema", "json_schema": form},
            }
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code in (200, 400), (schema, reply.text)
            if reply.status_code == 400:
                assert reply.json()["error"]["param"].startswith("response_format"), reply.text

    serve(check, says("{}"))
