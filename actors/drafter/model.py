"""The draft-model drafter: every step of a batch is one native call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.fused import FusedBody
from lexshard.actors.drafter.draft_cache import DraftCache, Turn, block_tables
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.proposal import Proposal
from lexshard.kernels.draft import DraftHead, PendingTokens, check_head, draft


class ModelDrafter:
    """Guesses with a draft model on the CPU, drawn with the target's own noise (``same-token``).

    Takes ``body`` over and gives it a KV cache of ``blocks`` blocks. ``head`` says which rows are
    looked at; ids from ``vocabulary_size`` on, the target's, are never guessed. What is guessed
    for a sequence depends on its history alone.

    Raises ValueError where the head does not fit the body.
    """

    name = "model"

    def __init__(
        self, body: FusedBody, head: DraftHead, *, blocks: int, vocabulary_size: int
    ) -> None:
        tokens = np.where(head.ids < vocabulary_size, head.ids, np.int32(-1))
        self._head = head._replace(ids=tokens)
        check_head(self._head, body.hidden_size, vocabulary_size)
        self._places = np.flatnonzero(tokens >= 0)  # rows of the head that are tokens
        self._tokens = tokens[self._places]
        self._routed = head.router is not None
        # The router asks for the hidden state before the last token: that of a token put in too.
        self._cache = DraftCache(blocks, body.max_positions, least_pending=2 if self._routed else 1)
        body.allocate_cache(blocks)
        self._stack = body.stack
        # Per sequence, of a routed head: the position of the first state, and the states.
        self._states: dict[int, tuple[int, npt.NDArray[np.float32]]] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """See `actors.drafter.protocol.Drafter`. Who has not caught up with a long prompt gets no
        guess yet, and who finds no room in the cache none at all."""
        turns = self._cache.turns(tasks)
        proposed = [Draft(reads=index in self._cache.behind) for index in range(len(tasks))]
        if not turns:
            return proposed
        drafted = draft(self._stack, self._head, self._pending(turns))
        for index, (turn, row) in enumerate(zip(turns, drafted.guesses.tolist(), strict=True)):
            guesses = [token for token in row if token >= 0]
            drawn_from = [
                Proposal(self._tokens, logits[self._places], turn.task.inverse_temperature)
                for logits in (drafted.logits[index, : len(guesses)] if turn.task.propose else ())
            ]
            if guesses:
                proposed[turn.index] = Draft(guesses, drawn_from)
            turn.finish(guesses)
        if self._routed:
            for turn, states in zip(turns, drafted.states, strict=True):
                last = turn.start + turn.count - 1
                known = max(1, len(proposed[turn.index].token_ids))
                self._states[turn.task.sequence] = last, states[:known]
        return proposed

    def forget(self, sequence: int) -> None:
        """See `actors.drafter.protocol.Drafter`."""
        self._cache.forget(sequence)
        self._states.pop(sequence, None)

    def _pending(self, turns: list[Turn]) -> PendingTokens:
        tasks = [turn.task for turn in turns]
        tokens = [token for turn in turns for token in turn.tokens]
        return PendingTokens(
            tokens=np.array(tokens, np.int32),
            offsets=np.array([0, *accumulate(turn.count for turn in turns)], np.int64),
            start=np.array([turn.start for turn in turns], np.int32),
            block_tables=block_tables(turns),
            most=np.array([turn.most for turn in turns], np.int32),
            key=np.array([task.key for task in tasks], np.uint64),
            inverse_temperature=np.array([task.inverse_temperature for task in tasks], np.float64),
            top_k=np.array([task.top_k for task in tasks], np.int64),
            top_p=np.array([task.top_p for task in tasks], np.float64),
            log_min_p=np.array([task.log_min_p for task in tasks], np.float64),
            state_before=self._states_before(turns),
            record=any(task.propose for task in tasks),
        )

    def _states_before(self, turns: list[Turn]) -> npt.NDArray[np.float32]:
        """Hidden states [S, d] of the positions before the turns' first tokens, where known."""
        width = self._stack.shape.hidden
        if not self._routed:
            return np.empty((0, width), np.float32)
        before = np.zeros((len(turns), width), np.float32)
        for row, turn in enumerate(turns):
            first, states = self._states.get(turn.task.sequence, (0, before[:0]))
            if 0 <= turn.start - 1 - first < len(states):
                before[row] = states[turn.start - 1 - first]
        return before
