"""Log-probabilities of a prompt on their way: found once, for all sequences that want the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from lexshard.actors.messages import Request, TokenLogprobs

# What scoring a row costs in tokens of a step: all its exact logits, and a pass over them. Measured
# on the demo; where the body is larger beside the vocabulary, steps that score end sooner.
SCORED_ROW_TOKENS = 6
# So many log-probabilities are packed, sent and unpacked in the time of one token: a step that told
# those of every choice of a long prompt would hold up their reader.
TOLD_PER_TOKEN = 150


@dataclass(slots=True, eq=False, weakref_slot=True)
class PromptScores:
    """The log-probabilities of the first tokens of a prompt of ``length`` tokens.

    Row ``r`` of the hidden states predicts token ``r + 1``; nothing predicts the first token, whose
    entry is None. Rows are scored in order, by whichever sequence computes them first; none is
    scored twice, whichever is preempted or leaves.
    """

    length: int
    most_likely: int  # how many tokens every entry lists
    entries: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def next_row(self) -> int:
        """The first row that is not scored yet."""
        return len(self.entries) - 1

    @property
    def complete(self) -> bool:
        return len(self.entries) == self.length

    def missing(self, start: int, stop: int) -> range:
        """Those of the rows from ``start`` to ``stop`` (excluded) that are still to be scored."""
        return range(max(start, self.next_row), min(stop, self.length - 1))

    def cost(self, start: int, count: int) -> int:
        """What computing ``count`` tokens from ``start`` on takes of a step's budget: more
        for rows to be scored and for the last token of the prompt, with which all is told."""
        scored = len(self.missing(start, start + count)) * (SCORED_ROW_TOKENS - 1)
        return count + scored + (self._telling if start < self.length <= start + count else 0)

    def affordable(self, start: int, budget: int) -> int:
        """How many tokens from ``start`` on may be computed for ``budget`` tokens of a step; at
        least one, which may cost more."""
        ahead = max(0, self.length - 1 - start)  # tokens before the one that tells
        left = budget - ahead - len(self.missing(start, self.length)) * (SCORED_ROW_TOKENS - 1)
        if left < 0:
            free = max(0, self.next_row - start)
            return max(1, min(budget, free + max(0, budget - free) // SCORED_ROW_TOKENS))
        telling = self._telling if start < self.length else 0
        return ahead + left - telling if left > telling else max(1, ahead)

    @property
    def _telling(self) -> int:
        return self.length * (self.most_likely + 1) // TOLD_PER_TOKEN


class SharedScores:
    """The `PromptScores` of unfinished sequences, one for all that want the same of a prompt."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[object, ...], PromptScores] = WeakValueDictionary()

    def of(self, request: Request) -> PromptScores | None:
        """What ``request`` wants of its prompt; None if that is nothing, or was told before."""
        count = request.parameters.prompt_logprobs
        if count is None or request.resumed_ids:
            return None
        name = (request.cache_salt, count, request.prompt_ids)
        scores = self._known.get(name)
        if scores is None:
            self._known[name] = scores = PromptScores(len(request.prompt_ids), count)
        return scores
