"""Log-probabilities of prompt tokens: what ``prompt_logprobs`` and ``echo`` return."""

from __future__ import annotations

import numpy as np
import torch

from lexshard.actors.decision.sampler import token_logprobs
from lexshard.actors.engine.step_plan import Chunk
from lexshard.actors.head.sequence_head import SequenceHead

ROWS_AT_ONCE = 24  # dense rows held in memory together


def score_prompt(head: SequenceHead, chunk: Chunk, hidden: torch.Tensor) -> None:
    """Add the log-probabilities of the prompt tokens that ``hidden [rows, d]`` predicts.

    Its rows are those of ``chunk.scored``; what another sequence with the same prompt has scored
    in this very step is known already. Raises what ``SequenceHead.candidates``
    raises (``NonFiniteHiddenError``).
    """
    sequence, scores = chunk.sequence, chunk.sequence.scores
    count = sequence.request.parameters.prompt_logprobs
    if scores is None or count is None:
        raise ValueError("this sequence did not ask for prompt log-probabilities")
    for first in range(scores.next_row, chunk.scored.stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, chunk.scored.stop)
        rows = hidden[first - chunk.scored.start : last - chunk.scored.start]
        candidates = head.whole_rows(rows)
        scores.entries += token_logprobs(
            candidates.raw.reshape(len(rows), head.vocabulary_size),
            np.array(sequence.token_ids[first + 1 : last + 1]),
            [count] * len(rows),
        )
