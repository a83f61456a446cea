"""``POST /v1/receipts/verify``: replies are made again from their receipts, beside all other work.

They are asked for with the lowest priority, each as one sequence.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.responses import Response
from starlette.types import ASGIApp

from lexshard.actors.receipts.document import ReceiptError, check_fits, read_receipt
from lexshard.actors.receipts.replay import Replay, ReplayVerdict
from lexshard.actors.receipts.signature import signed_by
from lexshard.actors.receipts.stop_rule import Spelling
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import bad_request, internal_error, json_response
from lexshard.serve_app.openai.protocol import StrictModel, parse, shown_as
from lexshard.serve_app.openai.workers import run_unless_disconnected

VERIFY = "/v1/receipts/verify"
LOWEST_PRIORITY = 2**31 - 1
MOST_RECEIPTS = 64


class VerifyRequest(StrictModel):
    """``POST /v1/receipts/verify``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"receipts": []}))

    receipts: Annotated[list[dict[str, Any]], Field(max_length=MOST_RECEIPTS, fail_fast=True)]


async def verify_receipts(call: HttpCall, body: Any) -> ASGIApp:
    """A verdict for each receipt, in their order.

    Raises:
        ApiError: 400 naming what is no receipt, or does not fit this model, 429 or 503 where there
            is no room, and what the engine says.
    """
    asked = parse(VerifyRequest, body)
    information = call.state.information()
    if not asked.receipts:
        return json_response({"object": "list", "data": []})
    here = await call.state.receipts.provenance(information)
    tokenizer = call.state.tokenizer
    spelling = Spelling(tokenizer.token_bytes, tokenizer.visible_token_bytes)
    context = min(information.max_model_len, information.kv_tokens)
    replays: list[Replay] = []
    keys: list[str | None] = []
    for number, told in enumerate(asked.receipts):
        try:
            receipt = read_receipt(told)
            check_fits(receipt, information.vocabulary_size, context)
            keys.append(signed_by(receipt))
        except ReceiptError as error:
            raise bad_request(f"'receipts.{number}': {error}", "receipts") from error
        replays.append(Replay(receipt, here, spelling, uuid.uuid4().hex, LOWEST_PRIORITY))
    await _check_grammars(call, replays)
    tokens = sum(len(each.request.prompt_ids) for each in replays)
    ticket = call.state.admission.admit(call.record.client, len(replays), tokens)
    with ticket.released_on_error():
        content = await run_unless_disconnected(
            call.request.receive, _verified(call, replays, keys, ticket)
        )
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
                grammar, field, information, call.request.receive
            )
            if compiled.error is not None:
                raise bad_request(f"'{field}': its grammar is none: {compiled.error}", "receipts")


async def _verified(
    call: HttpCall, replays: list[Replay], keys: list[str | None], ticket: Ticket
) -> Response:
    client = call.state.client
    by_name = {each.request.request_id: each for each in replays}
    first = {name: each.begin() for name, each in by_name.items()}
    running = {name for name, drafts in first.items() if drafts is not None}
    if running:
        stream = client.submit([by_name[name].request for name in running])
        try:
            for drafts in first.values():
                if drafts is not None:
                    client.draft(drafts)
            while running:
                for event in await stream.arrived():
                    replay = by_name[event.request_id]
                    if replay.verdict is not None:
                        continue
                    ticket.set_waiting(0)
                    drafts = replay.take(event)
                    if drafts is not None:
                        client.draft(drafts)
                    else:
                        running.discard(event.request_id)
        finally:
            stream.close()
    data = [
        {"index": i, **_told(each.verdict, call), "signed_by": keys[i]}
        for i, each in enumerate(replays)
    ]
    return json_response({"object": "list", "data": data})


def _told(verdict: ReplayVerdict | None, call: HttpCall) -> dict[str, Any]:
    if verdict is None:
        raise internal_error(call.record.request_id)
    return {"object": "receipt.verdict", **verdict.as_json()}
