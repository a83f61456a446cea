"""Replies with receipts: what an engine says, written down as its server would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import FinishReason, Request, SequenceEvent
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
from lexshard.actors.receipts.stop_rule import Spelling, StopRule
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.grammar_cases import SCHEMAS, schema_grammar
from tests.support.paths import DEMO
from tests.support.speculation_cases import requests_of


def maker_of(engine: Engine) -> Provenance:
    return made_by(model_hashes(DEMO), engine.information)


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
    here, said = maker_of(engine), _said(engine, requests)
    return [
        _receipt(request, said[request.request_id], here, rule_of(index))
        for index, request in enumerate(requests)
    ]


def with_rule(
    engine: Engine, request: Request, rule: StopRule | None, cut_there: bool = True
) -> Receipt:
    """Of one reply; not ``cut_there``: as if nothing had looked for its stop strings."""
    said = _said(engine, [request])[request.request_id]
    return _receipt(request, said, maker_of(engine), rule, cut_there)


def _said(engine: Engine, requests: Sequence[Request]) -> dict[str, list[SequenceEvent]]:
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
    return said


def rule_of(index: int) -> StopRule | None:
    """Stop strings of the reply with this index: two in five have some."""
    if index % 5 > 1:
        return None
    return StopRule((" the", '"', "e"), index % 2 == 0, index % 5 == 1)


def _receipt(
    request: Request,
    events: Sequence[SequenceEvent],
    here: Provenance,
    rule: StopRule | None,
    cut_there: bool = True,
) -> Receipt:
    options, seed = options_of(request.parameters), request.parameters.seed
    chain = DigestChain(here, seed, request.choice, options, rule, request.prompt_ids)
    ids = [token_id for event in events for token_id in event.token_ids]
    logits = [logit for event in events for logit in event.logits]
    last = events[-1]
    assert last.finish_reason is not None, last.error
    ended: tuple[FinishReason, int | str | None] = last.finish_reason, last.stop_reason
    if rule is not None and cut_there:
        text = spelling().detokenizer(rule, request.parameters.min_tokens)
        shown = len(ids) - (ended[0] == "stop" and not rule.include)
        for place, token_id in enumerate(ids[:shown], 1):
            if text.push(token_id):
                ids, ended = ids[:place], ("stop", text.stop_string)
                break
    chain.add(ids, logits[: len(ids)])
    chain.end(*ended)
    return Receipt(
        VERSION,
        here,
        seed,
        request.choice,
        options,
        rule,
        request.prompt_ids,
        tuple(ids),
        *ended,
        chain.header,
        tuple(chain.digests),
    )


@cache
def spelling() -> Spelling:
    """That of the demo's tokens."""
    tokenizer = ModelTokenizer.load(DEMO)
    return Spelling(tokenizer.token_bytes, tokenizer.visible_token_bytes)


def verdicts_of(engine: Engine, receipts: Sequence[Receipt]) -> list[ReplayVerdict]:
    """In the order of the receipts."""
    found = dict(replayed(engine, receipts, maker_of(engine), spelling()))
    return [found[index] for index in range(len(receipts))]
