"""At a temperature where a small model says anything: what has ended is an instance, all of it."""

from __future__ import annotations

from dataclasses import replace

import llguidance
import pytest

from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.grammar.limits import parser_limits
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.demo_engine import demo_engine
from tests.support.grammar_cases import (
    EOS,
    SCHEMAS,
    VOCABULARY,
    ends_well,
    random_schemas,
    schema_grammar,
)
from tests.support.paths import DEMO, DEMO_DRAFT

HOT = SamplingParameters(temperature=1.5, max_tokens=160)
AT_ONCE = 64


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [5_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_what_ends_is_an_instance_and_what_is_cut_a_beginning(
    prompt_ids: list[tuple[int, ...]], tokens: int
) -> None:
    schemas = (*SCHEMAS, *random_schemas(90))
    grammars = list(map(schema_grammar, schemas))
    engine = demo_engine(
        max_model_len=256, max_running=AT_ONCE, draft=str(DEMO_DRAFT), prefix_cache=True
    )
    codec = engine._text_codec()
    assert codec is not None
    tokenizer = llguidance.LLTokenizer(
        str(DEMO / "tokenizer.json"), n_vocab=VOCABULARY, eos_token=[*EOS]
    )
    said = ended = cut = place = 0
    while said < tokens:
        requests = []
        for _ in range(AT_ONCE):
            prompt = prompt_ids[place % len(prompt_ids)][:40]
            own = replace(HOT, grammar=grammars[place % len(grammars)], seed=place)
            requests.append(Request(str(place), 0, prompt, own))
            place += 1
        for request, completion in zip(requests, run_to_completion(engine, requests), strict=True):
            assert completion.error is None
            said += len(completion.token_ids)
            schema = int(request.request_id) % len(schemas)
            if completion.finish_reason == "stop":
                detokenizer = codec.detokenizer((), 0)
                for token_id in completion.token_ids[:-1]:
                    detokenizer.push(token_id)
                ends_well(detokenizer.finish(), schemas[schema])
                ended += 1
            else:
                matcher = llguidance.LLMatcher(tokenizer, grammars[schema], limits=parser_limits())
                assert matcher.consume_tokens(list(completion.token_ids)), matcher.get_error()
                cut += 1
    engine.check_idle()
    engine.close()
    assert ended > 3 * cut > 0
