"""The steps of a vLLM model runner, decided by the certified head, which follows the requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Any

import torch

from lexshard.actors.head.output_rows import NonFiniteHiddenError
from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.token_rules import Ids, TokenRules
from lexshard.serve_app.vllm.deferred import Answer, AskedRequest, DeferredLogits
from lexshard.serve_app.vllm.head import PluginHead
from lexshard.serve_app.vllm.tally import TALLY

UNKNOWN = "requests whose last tokens are not known yet"
NO_TOKEN = "rows that no token is left for"
NOT_FINITE = "rows with hidden states that are not finite"


@dataclass(slots=True)
class _Followed:
    """A request whose draws are certified. ``drawn`` are the last step's tokens."""

    parameters: Any
    sequence: int
    allowed: Mask | None
    drawn: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class CertifiedSteps:
    """``head`` with the requests it draws for. ``logprobs_mode`` is vLLM's. ``seeds`` are those of
    requests without one, the same on ranks that draw alike."""

    head: PluginHead
    logprobs_mode: str
    seeds: Random = field(default_factory=SystemRandom)
    _followed: dict[str, _Followed] = field(default_factory=dict)
    _opened: int = 0

    def decide(
        self, logits: DeferredLogits, asked: Sequence[AskedRequest], running: Collection[str]
    ) -> list[Answer | None]:
        """The tokens of every request of ``asked``; None where vLLM must draw them. Of requests
        that are not among the ``running`` ones any more nothing is kept."""
        TALLY.tell_if_due()
        if len(self._followed) > len(running):
            for gone in self._followed.keys() - set(running):
                self._forget(gone)
        answers: list[Answer | None] = [None] * len(asked)
        if logits.read is not None:
            TALLY.refuse("logits that were read before they were sampled from", len(logits))
            return answers
        places: list[tuple[int, _Followed]] = []
        rows: list[tuple[int, int, tuple[int, ...], Mask | None]] = []
        for place, request in enumerate(asked):
            followed = self._follow(request)
            if isinstance(followed, str):
                TALLY.refuse(followed, 1 + len(request.drafts))
                self._forget(request.request_id)
                continue
            places.append((place, followed))
            for guesses in range(1 + len(request.drafts)):
                row = request.first + guesses
                words = logits.masks.get(row)
                if words is not None and followed.allowed is not None:
                    words = words & followed.allowed.words
                mask = None if words is None else self.head.masks.of(words)
                rows.append((row, followed.sequence, request.drafts[:guesses], mask))
        if not rows:
            return answers
        numbers, sequences, drafted, masks = zip(*rows, strict=True)
        guessed = drafted if any(drafted) else ()
        names = RowNames(sequences, guessed, masks=masks if logits.masks else ())
        hidden = logits.hidden if len(rows) == len(logits.hidden) else logits.hidden[list(numbers)]
        left = iter(self._decided(hidden, names))
        for place, followed in places:
            drafts = asked[place].drafts
            answer = _accepted([next(left) for _ in (0, *drafts)], drafts)
            if isinstance(answer, str):
                TALLY.refuse(answer, 1 + len(drafts))
                continue
            answers[place] = answer
            followed.drawn = tuple(each.token_id for each in answer)
            TALLY.certified += 1 + len(drafts)
        return answers

    def _decided(self, hidden: torch.Tensor, names: RowNames) -> list[RowDecision | str]:
        """The decision of each row, or why there is none."""
        try:
            return [each or NO_TOKEN for each in self.head.decide(hidden, names)]
        except NonFiniteHiddenError as error:
            unsound = set(error.rows)
        sound = [row for row in range(len(hidden)) if row not in unsound]
        others = iter(self._decided(hidden[sound], names.some(sound)) if sound else ())
        return [NOT_FINITE if row in unsound else next(others) for row in range(len(hidden))]

    def _follow(self, asked: AskedRequest) -> _Followed | str:
        """The request as it stands before this step's tokens, or why it cannot be followed."""
        known = self._followed.get(asked.request_id)
        have = 0 if known is None else self.head.states[known.sequence].position
        if known is None or known.parameters is not asked.parameters or have > asked.length:
            self._forget(asked.request_id)  # another one of that name, or tokens were taken back
            return self._open(asked)
        fresh: Sequence[int] = known.drawn[: asked.length - have]
        if len(fresh) < asked.length - have:
            fresh = asked.tokens(have, asked.length)
        if min(fresh, default=0) < 0:
            return UNKNOWN
        self.head.states[known.sequence].append(*fresh)
        known.drawn = ()
        return known

    def _open(self, asked: AskedRequest) -> _Followed | str:
        refusal = request_refusal(asked.parameters, self.logprobs_mode)
        tokens = tuple(asked.tokens(0, asked.length))
        if refusal is not None or min(tokens, default=0) < 0:
            return refusal or UNKNOWN
        parameters = _translated(asked.parameters, self.seeds)
        prompt, output = tokens[: asked.prompt_length], tokens[asked.prompt_length :]
        request = Request(asked.request_id, 0, prompt, parameters, resumed_ids=output)
        self._opened += 1
        try:
            rules = _OutputRules(parameters, self.head.vocabulary_size, len(prompt))
            self.head.states.open(self._opened, request, rules)
        except ValueError as error:  # numbers that fp32 cannot hold, and vLLM takes
            return str(error)
        opened = _Followed(asked.parameters, self._opened, rules.mask)
        self._followed[asked.request_id] = opened
        return opened

    def _forget(self, request_id: str) -> None:
        if (known := self._followed.pop(request_id, None)) is not None:
            self.head.states.close(known.sequence)


def _accepted(decisions: Sequence[RowDecision | str], drafts: Sequence[int]) -> Answer | str:
    """The drawn tokens up to the first that is not what was guessed, or why one is missing."""
    answer: list[RowDecision] = []
    for decision, guess in zip(decisions, [*drafts, None], strict=True):
        if isinstance(decision, str):
            return decision
        answer.append(decision)
        if decision.token_id != guess:
            break
    return tuple(answer)


def request_refusal(parameters: Any, logprobs_mode: str) -> str | None:
    """Why the draws of a request cannot be certified, from vLLM's ``SamplingParams``; None if they
    can. ``logprobs_mode`` is the server's."""
    scored, structured = parameters.logprobs is not None, parameters.structured_outputs is not None
    allowed = structured and parameters.allowed_token_ids
    refusals = {
        "log-probabilities of named tokens": parameters.logprob_token_ids,
        "log-probabilities of the whole vocabulary": scored and parameters.logprobs < 0,
        f"log-probabilities in mode {logprobs_mode}": scored and logprobs_mode != "raw_logprobs",
        "log-probabilities of structured output with allowed tokens": scored and allowed,
        "a budget of thinking tokens": parameters.thinking_token_budget is not None,
        "tokens that follow a trace": parameters.trace_decode_token_ids,
        # vLLM gives stop tokens back where they alone fit.
        "min_tokens of structured output": structured and parameters.min_tokens,
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


def _translated(parameters: Any, seeds: Random) -> SamplingParameters:
    """What vLLM's ``SamplingParams`` ask, in our words, with one of ``seeds`` if they name none."""
    allowed = parameters.allowed_token_ids
    return SamplingParameters(
        temperature=parameters.temperature,
        top_k=max(0, parameters.top_k),
        top_p=parameters.top_p,
        min_p=parameters.min_p,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        logit_bias=tuple((parameters.logit_bias or {}).items()),
        bad_words=tuple(map(tuple, parameters.bad_words_token_ids or ())),
        allowed_ids=None if allowed is None else tuple(allowed),
        min_tokens=parameters.min_tokens,
        stop_token_ids=tuple(parameters.all_stop_token_ids),
        logprobs=parameters.logprobs,
        seed=seeds.getrandbits(63) if parameters.seed is None else parameters.seed,
    )


class _OutputRules(TokenRules):
    """Rules whose phrases begin in the output: vLLM does not look into prompts for bad words."""

    def __init__(self, parameters: SamplingParameters, size: int, prompt_length: int) -> None:
        super().__init__(parameters, size, ())
        self._prompt_length = prompt_length

    def banned(self, history: Sequence[int], drafted: tuple[int, ...], *, early: bool) -> Ids:
        output = history[self._prompt_length :] if self.phrases else ()
        return super().banned(output, drafted, early=early)
