"""Replies with receipts: what an engine says, written down as its server would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.actors.receipts.document import (
    VERSION,
    DigestChain,
    Provenance,
    Receipt,
    made_by,
    options_of,
)
from lexshard.actors.receipts.hashes import model_hashes
from lexshard.actors.receipts.replay import ReplayVerdict
from lexshard.actors.receipts.run import replayed
from tests.support.grammar_cases import SCHEMAS, schema_grammar
from tests.support.paths import DEMO
from tests.support.speculation_cases import requests_of


def maker_of(engine: Engine) -> Provenance:
    told = engine.information
    return made_by(model_hashes(DEMO), told.dtype, told.body, told.processor)


def receipt_requests(prompt_ids: list[tuple[int, ...]], count: int) -> list[Request]:
    """Every kind of sampling, one in four under a grammar; some are of a later choice."""
    requests = []
    for index, request in enumerate(requests_of(prompt_ids, count)):
        parameters = request.parameters
        if index % 4 == 3:
            grammar = schema_grammar(SCHEMAS[index // 4 % len(SCHEMAS)])
            parameters = replace(
                parameters,
                grammar=grammar,
                allowed_ids=None,
                ignore_eos=False,
                min_tokens=0,
                bad_words=(),
                max_tokens=60,
            )
        parameters = replace(parameters, receipt=True, prompt_logprobs=None)
        requests.append(replace(request, choice=index % 3, parameters=parameters))
    return requests


def receipts_of(engine: Engine, requests: Sequence[Request]) -> list[Receipt]:
    """What the engine says, all at once."""
    here = maker_of(engine)
    said: dict[str, list[SequenceEvent]] = {each.request_id: [] for each in requests}
    waiting = set(said)
    # A grammar may say all of a reply at once.
    events = [event for each in requests if (event := engine.submit(each)) is not None]
    while True:
        for event in events:
            said[event.request_id].append(event)
            if event.finish_reason is not None:
                waiting.discard(event.request_id)
        if not waiting:
            break
        events = engine.step()
    return [_receipt(request, said[request.request_id], here) for request in requests]


def _receipt(request: Request, events: Sequence[SequenceEvent], here: Provenance) -> Receipt:
    options, seed = options_of(request.parameters), request.parameters.seed
    chain = DigestChain(here, seed, request.choice, options, request.prompt_ids)
    for event in events:
        for token_id, logit in zip(event.token_ids, event.logits, strict=True):
            chain.add(token_id, logit)
    last = events[-1]
    assert last.finish_reason is not None, last.error
    chain.end(last.finish_reason, last.stop_reason)
    return Receipt(
        VERSION,
        here,
        seed,
        request.choice,
        options,
        request.prompt_ids,
        tuple(token_id for event in events for token_id in event.token_ids),
        last.finish_reason,
        last.stop_reason,
        chain.header,
        tuple(chain.digests),
    )


def verdicts_of(engine: Engine, receipts: Sequence[Receipt]) -> list[ReplayVerdict]:
    """In the order of the receipts."""
    found = dict(replayed(engine, receipts, maker_of(engine)))
    return [found[index] for index in range(len(receipts))]
