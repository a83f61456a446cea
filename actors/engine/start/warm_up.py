"""Requests that drive every kernel and batch size once, so that no client waits for a compiler."""

from __future__ import annotations

from dataclasses import replace

from lexshard.actors.messages import Request, SamplingParameters

OUTPUT_TOKENS = 3

_KINDS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8),
    SamplingParameters(temperature=0.8, top_k=40),
    SamplingParameters(temperature=0.8, min_p=0.05),
    SamplingParameters(temperature=0.8, top_p=0.9),
    SamplingParameters(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParameters(temperature=0.0, logprobs=2, prompt_logprobs=2),
    SamplingParameters(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    ),
    SamplingParameters(temperature=0.7, logit_bias=((0, 1.0),), bad_words=((0, 1),)),
    SamplingParameters(temperature=0.0, allowed_ids=(0, 1, 2)),
)


# Enough for several steps of guessing.
MEASURED_TOKENS = 12
ROUNDS_OF_ONE = 4


def sized_requests(max_running: int, max_model_len: int) -> list[list[Request]]:
    """Rounds of 1, 2, 4 ... ``max_running`` sequences, to see what a step of so many costs; of one
    several: a run of its steps is one figure, and all others are compared with it."""
    rounds = []
    parameters = SamplingParameters(
        temperature=0.8, max_tokens=min(MEASURED_TOKENS, max_model_len - 1), ignore_eos=True
    )
    sizes = [1] * ROUNDS_OF_ONE + [2**power for power in range(1, max_running.bit_length())]
    for size in sizes:
        rounds.append([Request(f"size-{size}-{i}", 0, (i,), parameters) for i in range(size)])
    return rounds


def warm_up_requests(
    max_model_len: int,
    max_running: int,
    step_tokens: int,
    vocabulary_size: int,
    *,
    sizes_matter: bool,
) -> list[list[Request]]:
    """Rounds of requests, to be run one round after the other.

    Every kind of sampling alone and together, and a batch of ``max_running`` sequences. Where
    ``sizes_matter``, because what is compiled or recorded is for steps of one size, as on a GPU,
    batches of every size, too, and one prompt that fills a step.
    """

    def prompt(length: int, first: int) -> tuple[int, ...]:
        length = max(1, min(length, max_model_len - OUTPUT_TOKENS))
        return tuple((first + i) % vocabulary_size for i in range(length))

    def request(name: str, length: int, parameters: SamplingParameters) -> Request:
        parameters = replace(parameters, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        return Request(f"warm-up-{name}", 0, prompt(length, len(name)), parameters)

    def batch(size: int) -> list[Request]:
        return [request(f"{size}-{i}", 1, _KINDS[i % 3]) for i in range(size)]

    longer = 20 if sizes_matter else 2
    rounds = [[request(f"kind-{i}", 2 + i, kind)] for i, kind in enumerate(_KINDS)]
    rounds.append([request(f"all-{i}", longer + i, kind) for i, kind in enumerate(_KINDS)])
    if sizes_matter:
        rounds.append([request("long", step_tokens + 1, _KINDS[0])])
        sizes = [2**power for power in range(1, max_running.bit_length())]
    else:
        sizes = [max_running]
    return [*rounds, *map(batch, sizes)]
