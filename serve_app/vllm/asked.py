"""What a model runner of vLLM asks of a step, and what it gets, in numbers and in tensors.

Imports nothing that compiles: vLLM looks through all that is loaded when a worker starts, and fails
on objects of the compiler of our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from lexshard.actors.messages import RowDecision

# Tokens of a request from one index to another, prompt first; negative where not known yet.
Tokens = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class AskedRequest:
    """What one request asks of a step: the token at ``length`` and, behind each of the ``drafts``
    that turns out right, the next one. Its rows of the logits begin at ``first``."""

    request_id: str
    parameters: Any  # vLLM's SamplingParams
    prompt_length: int
    length: int
    first: int
    drafts: tuple[int, ...]
    tokens: Tokens


Answer = tuple["RowDecision", ...]  # a request's tokens of a step


def mask_words(packed: npt.NDArray[np.int32], vocabulary_size: int) -> npt.NDArray[np.uint64]:
    """A row [ceil(V / 32)] of vLLM's bitmask as words of 64 bits [ceil(V / 64)]; bits beyond the
    vocabulary are 0."""
    words = np.zeros(-(-vocabulary_size // 64), np.uint64)
    halves = words.view(np.int32)
    used = min(len(halves), len(packed))
    halves[:used] = packed[:used]
    if vocabulary_size % 64:
        words[-1] &= np.uint64((1 << vocabulary_size % 64) - 1)
    return words


def mask_rows(
    names: Sequence[str], guesses: Mapping[str, Sequence[int]], rows: int
) -> dict[tuple[str, int], int]:
    """Which of the ``rows`` of vLLM's bitmask is that of a request behind so many of its
    ``guesses``: vLLM 0.32 gives each request one and a row for each guess, 0.33 the same number to
    all. Raises ValueError for any other number."""
    counts = np.array([1 + len(guesses.get(name, ())) for name in names], np.int64)
    firsts = np.cumsum(counts) - counts
    if rows != counts.sum():
        each, left = divmod(rows, len(names))
        if left or each < counts.max():
            raise ValueError(f"a bitmask of {rows} rows for {counts.tolist()} places of requests")
        firsts = np.arange(len(names)) * each
    own = zip(names, firsts.tolist(), counts.tolist(), strict=True)
    return {(name, place): first + place for name, first, count in own for place in range(count)}


def as_tensors(answers: Sequence[Answer | None], tokens: Tensor, *scores: Tensor) -> None:
    """Writes ``answers`` [B] into ``tokens`` [B, S] and, where requests asked for
    log-probabilities, into ``scores``: ids and log-probabilities [B * S, K + 1], the drawn token
    first, and its rank [B * S]."""
    width = tokens.shape[1]
    for place, answer in enumerate(answers):
        ids = [each.token_id for each in answer or ()]
        if ids:
            tokens[place] = torch.tensor(ids + [-1] * (width - len(ids)), dtype=tokens.dtype)
        for row, decision in enumerate(answer or (), start=place * width):
            found = decision.logprobs
            if found is not None and scores:
                best = found.top[: scores[0].shape[1] - 1]
                size = 1 + len(best)
                scores[0][row, :size] = torch.tensor([found.token_id, *(i for i, _ in best)])
                scores[1][row, :size] = torch.tensor([found.logprob, *(p for _, p in best)])
                scores[2][row] = found.rank
