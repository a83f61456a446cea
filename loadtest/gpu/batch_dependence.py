"""How often a token depends on what else is computed: sequences together, then each alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lexshard.actors.engine.completion import SteppingEngine, run_to_completion
from lexshard.actors.messages import Request, SamplingParameters

PROMPT_TOKENS = 24
LOWEST_ID = 5  # beyond what ends a sequence


class BatchDependence(NamedTuple):
    """Tokens up to and including a sequence's first difference, and how many differences.

    After its first difference a sequence is another one, so nothing more is learnt from it.
    """

    compared: int
    different: int


def requests(vocabulary_size: int, sequences: int, tokens: int) -> list[Request]:
    """Random prompts, sampled at temperature 0.8, each with a seed of its own."""
    random = np.random.default_rng(0)
    prompts = random.integers(LOWEST_ID, vocabulary_size, (sequences, PROMPT_TOKENS))
    return [
        Request(
            f"batch-{number}",
            0,
            tuple(int(token) for token in prompt),
            SamplingParameters(temperature=0.8, max_tokens=tokens, ignore_eos=True, seed=number),
        )
        for number, prompt in enumerate(prompts)
    ]


def batch_dependence(
    engine: SteppingEngine, *, vocabulary_size: int = 4096, sequences: int, tokens: int
) -> BatchDependence:
    """Runs ``sequences`` of ``tokens`` each together and then one by one, and compares.

    Raises RuntimeError where a sequence ends with an error.
    """
    asked = requests(vocabulary_size, sequences, tokens)
    together = [each.token_ids for each in run_to_completion(engine, asked)]
    compared = different = 0
    for request, beside in zip(asked, together, strict=True):
        [alone] = run_to_completion(engine, [request])
        if alone.error is not None or len(beside) != tokens:
            raise RuntimeError(f"{request.request_id} did not come to its end: {alone.error}")
        pairs = zip(beside, alone.token_ids, strict=True)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        compared += tokens if first is None else first + 1
        different += first is not None
    return BatchDependence(compared, different)
