"""From request fields to ``SamplingParameters``; everything checked, so that nothing a client
sends can fail inside a step."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.messages import SamplingParameters
from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.openai.protocol import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_LOGPROBS,
    GenerationFields,
)
from lexshard.serve_app.request_record import RequestRecord

# Colder than this the noise no longer changes the argmax, and 1 / temperature may overflow.
GREEDY_BELOW = 1e-5


def random_seed() -> int:
    """63 random bits, so that the seed is an int64 in every client's language."""
    return secrets.randbits(63)


def check_priority(priority: int | None, record: RequestRecord) -> None:
    """Raises:
    ApiError: 400 for a lower one than the client may ask for.
    """
    if priority is not None and priority < record.lowest_priority:
        raise bad_request(
            f"'priority' is {priority}; the lowest you may ask for is {record.lowest_priority}",
            "priority",
        )


def check_common(request: GenerationFields, record: RequestRecord) -> None:
    """The rules between fields that all protocols share, and which client may ask what."""
    check_priority(request.priority, record)
    if request.stream_options is not None and not request.stream:
        raise bad_request("'stream_options' needs 'stream'", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("'prompt_logprobs' cannot be streamed", "prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise bad_request(
            "'truncate_prompt_tokens' must be -1 or at least 1", "truncate_prompt_tokens"
        )
    check_logprob_count(request.prompt_logprobs, "prompt_logprobs")
    characters = sum(map(len, request.bad_words or ()))
    if characters > MAX_BAD_WORD_CHARACTERS:
        raise bad_request(
            f"'bad_words' hold {characters} characters, more than {MAX_BAD_WORD_CHARACTERS}",
            "bad_words",
        )


def check_logprob_count(count: int | None, parameter: str) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        asked = "the whole vocabulary" if count == -1 else str(count)
        raise bad_request(
            f"'{parameter}' asks for {asked}; this server returns at most {MAX_LOGPROBS}",
            parameter,
        )


def sampling_parameters(
    request: GenerationFields,
    logprobs: int | None,
    prompt_logprobs: int | None,
    information: EngineInformation,
    bad_words: tuple[tuple[int, ...], ...],
    grammar: str | None = None,
) -> SamplingParameters:
    """Everything but ``max_tokens`` and ``seed``, which belong to one prompt. ``grammar`` is what
    the whole output must match, if anything.

    A field the request leaves out takes the model's own default, then the neutral value.
    """

    def value(name: str, neutral: float) -> float:
        given = getattr(request, name)
        return information.default_sampling.get(name, neutral) if given is None else given

    vocabulary = information.vocabulary_size
    temperature = float(value("temperature", 1.0))
    top_k = int(value("top_k", 0))
    top_p = float(value("top_p", 1.0))
    if top_p == 0.0:  # the smallest nucleus there is: the best token alone
        top_k, top_p = 1, 1.0
    return SamplingParameters(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=top_k if 0 < top_k < vocabulary else 0,
        top_p=top_p,
        min_p=float(value("min_p", 0.0)),
        repetition_penalty=float(value("repetition_penalty", 1.0)),
        presence_penalty=float(value("presence_penalty", 0.0)),
        frequency_penalty=float(value("frequency_penalty", 0.0)),
        logit_bias=_logit_bias(request.logit_bias, vocabulary),
        bad_words=bad_words,
        allowed_ids=_allowed_ids(request.allowed_token_ids, vocabulary),
        grammar=grammar,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=_token_ids(request.stop_token_ids or (), vocabulary, "stop_token_ids"),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        certificate=bool(request.certificate),
        draft=bool(request.draft),
        receipt=bool(request.receipt),
    )


def completion_fields(parameters: SamplingParameters, priority: int = 0) -> dict[str, Any]:
    """The fields of ``POST /v1/completions`` that ask for ``parameters``: what
    `sampling_parameters` makes of them again. Bad words are left out, which are ids already; only
    sessions of devices have ``labels``."""
    told = asdict(parameters)
    del told["bad_words"]
    told["allowed_token_ids"] = told.pop("allowed_ids")
    told["logit_bias"] = {str(token): bias for token, bias in parameters.logit_bias}
    if grammar := told.pop("grammar"):
        told["structured_outputs"] = {"grammar": grammar}
    # Seeds are any 64 bits here, an int64 in a request.
    told["seed"] = (parameters.seed + 2**63) % 2**64 - 2**63
    told["priority"] = priority
    # Most numbers are said even if they are 0: a model may have its own default for them.
    for name in ("presence_penalty", "frequency_penalty", "min_tokens", "priority"):
        told[name] = told[name] or None
    numbers = (int, float)
    return {name: it for name, it in told.items() if it or type(it) in numbers}


def _token_ids(ids: Sequence[int], vocabulary: int, parameter: str) -> tuple[int, ...]:
    distinct = tuple(sorted(set(ids)))
    if distinct and distinct[-1] >= vocabulary:
        raise bad_request(
            f"'{parameter}' holds {distinct[-1]}, outside 0..{vocabulary - 1}", parameter
        )
    return distinct


def _allowed_ids(ids: list[int] | None, vocabulary: int) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if len(ids) > vocabulary:
        raise bad_request(
            f"'allowed_token_ids' holds {len(ids)} ids; the vocabulary has {vocabulary}",
            "allowed_token_ids",
        )
    return _token_ids(ids, vocabulary, "allowed_token_ids")


def _logit_bias(bias: dict[str, float] | None, vocabulary: int) -> tuple[tuple[int, float], ...]:
    def is_id(key: str) -> bool:
        return key.isascii() and key.isdecimal() and len(key) < 11 and int(key) < vocabulary

    wrong = [repr(key[:40]) for key in bias or {} if not is_id(key)]
    if wrong:
        told = f"keys are token ids below {vocabulary}"
        raise bad_request(f"'logit_bias' has the key {', '.join(wrong[:5])}: {told}", "logit_bias")
    # Of '7' and '07', which are one token, the last counts.
    return tuple(sorted({int(key): float(each) for key, each in (bias or {}).items()}.items()))
