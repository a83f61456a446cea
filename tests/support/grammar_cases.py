"""Requests with grammars, and what they must say: masked decoding, one token and one row at a time.

The oracle asks llguidance for the mask of every place, and an engine without any grammar, whose
head reads everything, for the one token after it among those that the mask allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llguidance
import numpy as np

from lexshard.actors.engine.completion import Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.grammar.limits import parser_limits
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.paths import DEMO

EOS = (0, 4)
VOCABULARY = 16_384
SPACES = r"[\x20\x0A\x0D\x09]{0,8}"


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(name={"type": "string", "maxLength": 12}, age={"type": "integer"}),
    _object(color={"enum": ["red", "green", "blue"]}, shade={"type": "boolean"}),
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 5},
    _object(
        id={"type": "string", "pattern": "^[A-F]{2}[0-9]{4}$"},
        when={"format": "date", "type": "string"},
    ),
    _object(nested=_object(deep=_object(value={"type": ["string", "null"]}))),
    _object(kind={"const": "a long constant: no token is drawn"}, ok={"type": "boolean"}),
    {"anyOf": [_object(a={"type": "integer"}), _object(b={"type": "string"})]},
    {"type": "string", "minLength": 3, "maxLength": 20},
    _object(
        tags={
            "type": "array",
            "items": {"enum": ["x", "y", "zebra", "zebra crossing"]},
            "maxItems": 3,
        }
    ),
    {"const": {"all": ["of", "it", "is", "forced"], "n": 1}},
)


def random_schema(random: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """One of those that an application might have: fields, lists, choices, bounded texts."""
    kinds = ["string", "integer", "number", "boolean", "enum", "date", "pattern", "null"]
    kind = str(random.choice([*kinds, "object", "object", "array", "any"] if depth else kinds))
    if kind == "object":
        names = random.permutation(
            ["id", "name", "first_name", "price", "tags", "parent", "is_new"]
        )
        fields = {
            str(name): random_schema(random, depth - 1)
            for name in names[: int(random.integers(1, 5))]
        }
        required = [name for name in fields if random.random() < 0.7]
        return {**_object(**fields), "required": required}
    if kind == "array":
        most = int(random.integers(1, 5))
        items = random_schema(random, depth - 1)
        return {"type": "array", "items": items, "minItems": most // 3, "maxItems": most}
    if kind == "any":
        return {"anyOf": [random_schema(random, depth - 1) for _ in range(2)]}
    if kind == "string":
        return {"type": "string", "maxLength": int(random.integers(1, 30))}
    if kind == "enum":
        return {"enum": [*map(str, random.permutation(["on", "off", "only", "none"])), 1, None]}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]{1,3})?$"}
    if kind == "date":
        return {"type": "string", "format": str(random.choice(["date", "time", "uuid", "ipv4"]))}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": int(random.integers(1, 10**6))}
    return {"type": kind}


def random_schemas(count: int) -> list[dict[str, Any]]:
    """Objects whose fields are random."""
    random = np.random.default_rng(23)
    return [
        _object(**{f"field_{name}": random_schema(random) for name in "abc"[: 1 + index % 3]})
        for index in range(count)
    ]


OTHERS = (
    llguidance.LLMatcher.grammar_from_regex(r"(yes|no|maybe so)"),
    llguidance.LLMatcher.grammar_from_regex(r"[a-z ]{5,40}\\."),
    llguidance.LLMatcher.grammar_from_lark(
        'start: "Once" " upon"? " a" word+\nword: / [a-z]{1,8}/\n'
    ),
)
SAMPLINGS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=1.0),
    SamplingParameters(temperature=1.5),
    SamplingParameters(temperature=0.9, top_p=0.8),
    SamplingParameters(temperature=1.1, top_k=20, top_p=0.95),
    SamplingParameters(temperature=0.8, min_p=0.05),
    SamplingParameters(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParameters(temperature=0.7, logprobs=2),
    SamplingParameters(temperature=1.2, logit_bias=((300, 3.0),), certificate=True, draft=True),
)


def schema_grammar(schema: dict[str, Any]) -> str:
    """As the server asks for it, with bounded spaces."""
    text: str = llguidance.LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": SPACES}
    )
    return text


GRAMMARS = (*map(schema_grammar, SCHEMAS), *OTHERS)


def grammar_requests(
    prompt_ids: Sequence[tuple[int, ...]], count: int, grammars: Sequence[str] = GRAMMARS
) -> list[Request]:
    """Every grammar and every sampling in turn, none of them always together."""
    random = np.random.default_rng(11)
    requests = []
    for index in range(count):
        parameters = replace(
            SAMPLINGS[(index + index // len(grammars)) % len(SAMPLINGS)],
            grammar=grammars[index % len(grammars)],
            max_tokens=int(random.integers(4, 48)),
            seed=int(random.integers(0, 2**63)),
        )
        prompt = (index + 20, *prompt_ids[index % len(prompt_ids)][:40])
        requests.append(Request(str(index), 0, prompt, parameters))
    return requests


class MaskedDecoding:
    """The oracle. ``engine`` knows no grammar."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer = llguidance.LLTokenizer(
            str(DEMO / "tokenizer.json"), n_vocab=VOCABULARY, eos_token=[*EOS]
        )

    def say(self, requests: Sequence[Request]) -> list[tuple[tuple[int, ...], str]]:
        """The output of each, and why it ends."""
        said: list[list[int]] = [[] for _ in requests]
        reasons: list[str | None] = [None] * len(requests)
        matchers = [
            llguidance.LLMatcher(
                self._tokenizer, each.parameters.grammar or "", limits=parser_limits()
            )
            for each in requests
        ]
        while None in reasons:
            left = [place for place, reason in enumerate(reasons) if reason is None]
            asked = []
            for place in left:
                request, output = requests[place], said[place]
                one = replace(
                    request.parameters,
                    grammar=None,
                    allowed_ids=self._allowed(matchers[place]),
                    max_tokens=len(output) + 1,
                )
                asked.append(replace(request, parameters=one, resumed_ids=tuple(output)))
            for place, completion in zip(left, run_to_completion(self._engine, asked), strict=True):
                [token_id] = completion.token_ids
                said[place].append(token_id)
                if token_id in EOS:
                    reasons[place] = "stop"
                elif len(said[place]) == requests[place].parameters.max_tokens:
                    reasons[place] = "length"
                else:
                    assert matchers[place].consume_token(token_id), matchers[place].get_error()
        return [(tuple(ids), str(reason)) for ids, reason in zip(said, reasons, strict=True)]

    def _allowed(self, matcher: llguidance.LLMatcher) -> tuple[int, ...]:
        if matcher.is_stopped():
            assert not matcher.is_error(), matcher.get_error()
            return EOS[:1]
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return tuple(np.flatnonzero(bits).tolist())


def told(completions: Sequence[Completion]) -> list[tuple[tuple[int, ...], str]]:
    """What the oracle tells, of an engine's completions."""
    assert [each.error for each in completions if each.error] == []
    return [(each.token_ids, each.finish_reason) for each in completions]


def ends_well(text: str, schema: dict[str, Any]) -> None:
    """Raises where a text is no instance of the schema."""
    import jsonschema

    jsonschema.validate(json.loads(text), schema)
