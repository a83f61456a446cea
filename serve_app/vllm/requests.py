"""vLLM's sampling parameters as ours, or why a request is left to vLLM's own sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lexshard.actors.messages import SamplingParameters
from lexshard.actors.states.token_rules import Ids, TokenRules

GREEDY_BELOW = 1e-5  # vLLM's own limit


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


def translated(parameters: Any, seed: int) -> SamplingParameters:
    """What vLLM's ``SamplingParams`` ask, in our words, drawn with ``seed``."""
    greedy, allowed = parameters.temperature < GREEDY_BELOW, parameters.allowed_token_ids
    return SamplingParameters(
        temperature=0.0 if greedy else parameters.temperature,
        top_k=0 if greedy else max(0, parameters.top_k),
        top_p=1.0 if greedy else parameters.top_p,
        min_p=0.0 if greedy else parameters.min_p,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        logit_bias=tuple((parameters.logit_bias or {}).items()),
        bad_words=tuple(map(tuple, parameters.bad_words_token_ids or ())),
        allowed_ids=None if allowed is None else tuple(allowed),
        min_tokens=parameters.min_tokens,
        stop_token_ids=tuple(parameters.all_stop_token_ids),
        logprobs=parameters.logprobs,
        seed=seed,
    )


class OutputRules(TokenRules):
    """Rules whose phrases begin in the output: vLLM does not look into prompts for bad words."""

    def __init__(self, parameters: SamplingParameters, size: int, prompt_length: int) -> None:
        super().__init__(parameters, size, ())
        self._prompt_length = prompt_length

    def banned(self, history: Sequence[int], drafted: tuple[int, ...], *, early: bool) -> Ids:
        output = history[self._prompt_length :] if self.phrases else ()
        return super().banned(output, drafted, early=early)
