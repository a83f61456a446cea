"""``POST /v1/receipts/verify``: replies are made again from their receipts, beside all other work.

They are asked for with the lowest priority, each as one sequence. With ``"stream": true`` events
tell how far each has come.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lexshard.actors.receipts.document import ReceiptError, check_fits, read_receipt
from lexshard.actors.receipts.replay import Replay, ReplayVerdict
from lexshard.actors.receipts.signature import signed_by
from lexshard.actors.receipts.stop_rule import Spelling
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import ApiError, bad_request, internal_error, json_response
from lexshard.serve_app.openai.generation import failure_of
from lexshard.serve_app.openai.protocol import StrictModel, parse, shown_as
from lexshard.serve_app.openai.response_writer import DONE, server_sent_event
from lexshard.serve_app.openai.streaming import EVENT_STREAM_HEADERS, START
from lexshard.serve_app.openai.workers import SHORT_TEXT, run_unless_disconnected

VERIFY = "/v1/receipts/verify"
LOWEST_PRIORITY = 2**31 - 1
MOST_RECEIPTS = 64


class VerifyRequest(StrictModel):
    """``POST /v1/receipts/verify``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"receipts": []}))

    receipts: Annotated[list[dict[str, Any]], Field(max_length=MOST_RECEIPTS, fail_fast=True)]
    stream: bool | None = None


async def verify_receipts(call: HttpCall) -> ASGIApp:
    """A verdict for each receipt, in their order.

    Raises:
        ApiError: 400 naming what is no receipt, or does not fit this model, 429 or 503 where there
            is no room, and what the engine says.
    """
    asked = await call.read(partial(parse, VerifyRequest))
    information = call.state.information()
    if not asked.receipts:
        return json_response({"object": "list", "data": []})
    here = await call.state.receipts.provenance(information)
    tokenizer = call.state.tokenizer
    spelling = Spelling(tokenizer.token_bytes, tokenizer.visible_token_bytes)

    def read() -> tuple[list[Replay], list[str | None]]:
        replays: list[Replay] = []
        keys: list[str | None] = []
        for number, told in enumerate(asked.receipts):
            try:
                receipt = read_receipt(told)
                check_fits(receipt, information.vocabulary_size, information.context)
                keys.append(signed_by(receipt))
            except ReceiptError as error:
                raise bad_request(f"'receipts.{number}': {error}", "receipts") from error
            replays.append(Replay(receipt, here, spelling, uuid.uuid4().hex, LOWEST_PRIORITY))
        return replays, keys

    # Beside the loop, however short they are: hashes of as many tokens take seconds.
    replays, keys = await call.run(SHORT_TEXT + 1, read)
    await _check_grammars(call, replays)
    tokens = sum(len(each.request.prompt_ids) for each in replays)
    ticket = call.state.admission.admit(call.record.client, len(replays), tokens)
    verification = Verification(call, replays, keys, ticket)
    if asked.stream:
        return VerdictStream(verification)
    with ticket.released_on_error():
        content = await run_unless_disconnected(call.request.receive, verification.whole())
    ticket.release()
    return content


async def _check_grammars(call: HttpCall, replays: list[Replay]) -> None:
    """Raises:
    ApiError: 400 for a grammar that is none, or takes too much.
    """
    for number, replay in enumerate(replays):
        grammar = replay.request.parameters.grammar
        if grammar is not None:
            field, information = f"receipts.{number}", call.state.information()
            compiled = await call.state.grammars.compiled(
                grammar, field, information, call.request.receive, call.record.client
            )
            if compiled.error is not None:
                raise bad_request(f"'{field}': its grammar is none: {compiled.error}", "receipts")


class Verification:
    """Replies on their way through the engine once more. ``keys`` signed them, where any
    did."""

    def __init__(
        self, call: HttpCall, replays: list[Replay], keys: list[str | None], ticket: Ticket
    ) -> None:
        self.call = call
        self.ticket = ticket
        self._replays = replays
        self._keys = keys

    async def progress(self) -> AsyncIterator[set[int]]:
        """Which of them have come further, until all have their verdicts. Raises `ApiError` where
        the engine fails."""
        client, replays = self.call.state.client, self._replays
        places = {each.request.request_id: i for i, each in enumerate(replays)}
        first = [each.begin() for each in replays]
        running = {i for i, drafts in enumerate(first) if drafts is not None}
        if not running:
            return
        stream = client.submit([replays[i].request for i in sorted(running)])
        try:
            for drafts in first:
                if drafts is not None:
                    client.draft(drafts)
            while running:
                further: set[int] = set()
                for event in await stream.arrived():
                    place = places[event.request_id]
                    replay = replays[place]
                    if replay.verdict is not None:
                        continue
                    if event.finish_reason in ("error", "abort") and not event.refused:
                        # An engine that is gone says nothing of a receipt.
                        raise failure_of(event, self.call.record.request_id)
                    self.ticket.set_waiting(0)
                    further.add(place)
                    drafts = replay.take(event)
                    if drafts is not None:
                        client.draft(drafts)
                    else:  # what has its verdict keeps no place from others
                        running.discard(place)
                        client.cancel(event.request_id)
                yield further
        finally:
            stream.close()

    async def whole(self) -> Response:
        """All verdicts together."""
        async for _ in self.progress():
            pass
        return json_response({"object": "list", "data": self.verdicts()})

    def verdicts(self) -> list[dict[str, Any]]:
        return [
            {"index": i, **_told(each.verdict, self.call), "signed_by": self._keys[i]}
            for i, each in enumerate(self._replays)
        ]

    def step(self, place: int) -> dict[str, Any]:
        """How far one of them has come."""
        told = {"object": "receipt.progress", "index": place}
        return {**told, "equal_tokens": self._replays[place].equal}


class VerdictStream:
    """A response that tells how far each reply has come, then the verdicts, as events."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_unless_disconnected(receive, self._write(send))
        finally:
            self._verification.ticket.release()

    async def _write(self, send: Send) -> None:
        verification = self._verification
        await send({**START, "headers": [*EVENT_STREAM_HEADERS]})

        async def tell(events: list[dict[str, Any]], *, last: bool = False) -> None:
            body = b"".join(map(server_sent_event, events)) + (DONE if last else b"")
            await send({"type": "http.response.body", "body": body, "more_body": not last})

        try:
            async for further in verification.progress():
                await tell([verification.step(place) for place in sorted(further)])
            verdicts = verification.verdicts()
        except ApiError as error:
            verdicts = [error.body()]
        await tell(verdicts, last=True)


def _told(verdict: ReplayVerdict | None, call: HttpCall) -> dict[str, Any]:
    if verdict is None:
        raise internal_error(call.record.request_id)
    return {"object": "receipt.verdict", **verdict.as_json()}
