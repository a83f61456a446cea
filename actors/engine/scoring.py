"""Log-probabilities of prompt tokens: what ``prompt_logprobs`` and ``echo`` return."""

from __future__ import annotations

import torch

from actors.decision.sampler import token_logprobs
from actors.engine.scheduler import Chunk
from actors.head.build import OutputHead
from actors.messages import TokenLogprobs
from actors.states.need import Need

ROWS_AT_ONCE = 16  # dense rows held in memory together

_DENSE = Need("dense")


def score_prompt(shard: OutputHead, chunk: Chunk, hidden: torch.Tensor) -> None:
    """Append the log-probabilities of the prompt tokens that ``hidden [rows, d]`` predicts.

    Row ``r`` is position ``chunk.start + r`` and predicts the token after it; the first token of
    a prompt has no prediction.
    """
    sequence = chunk.sequence
    count = sequence.request.parameters.prompt_logprobs
    if count is None:
        raise ValueError("this sequence did not ask for prompt log-probabilities")
    if chunk.start == 0:
        sequence.prompt_logprobs.append(None)
    for first in range(0, hidden.shape[0], ROWS_AT_ONCE):
        rows = hidden[first : first + ROWS_AT_ONCE]
        candidates = shard.rescore(shard.screen(rows, [_DENSE] * rows.shape[0]))
        normalizers = shard.log_normalizers(candidates, range(rows.shape[0]))
        for row in range(rows.shape[0]):
            raw = candidates.raw[candidates.offsets[row] : candidates.offsets[row + 1]]
            token_id = sequence.token_ids[chunk.start + first + row + 1]
            scored: TokenLogprobs = token_logprobs(raw, float(normalizers[row]), token_id, count)
            sequence.prompt_logprobs.append(scored)
