"""Who computes how many tokens in the next step.

First come, first served within a priority; running sequences before waiting ones. A step has a
budget of tokens; a sequence that is one token behind decodes, one that is a thousand behind takes
a chunk of the budget: nothing else tells prompt and output apart. When blocks run out, the
sequence that is last in order gives up its blocks and computes them again later (its tokens are
kept, and a batch-invariant body gives the same continuation).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from actors.engine.kv_cache import BLOCK_TOKENS, BlockPool
from actors.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """``count`` tokens of one sequence from position ``start`` on.

    Its last ``draws`` rows draw a token each: the first of them for the token after the sequence's
    own, the others for those after one more of the ``drafted`` tokens each, which are the last
    tokens of the chunk. None draws while the chunk does not catch up with the sequence.
    ``scores`` says that the log-probabilities of the prompt tokens are wanted.
    """

    sequence: Sequence
    start: int
    count: int
    draws: int
    scores: bool
    drafted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What the next step computes."""

    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Decides every step's ``StepPlan`` and owns the blocks.

    ``step_tokens`` bounds the tokens of one step, ``max_running`` the sequences that hold blocks.
    Of the running sequences a step draws tokens for one of ``cohorts`` equal parts at most: with
    two, one part's tokens are decided while the other's hidden states are computed. Sequences that
    are awaiting a decision are in no plan.
    """

    def __init__(
        self, pool: BlockPool, *, step_tokens: int, max_running: int, cohorts: int = 1
    ) -> None:
        self.pool = pool
        self.preemptions = 0
        self._step_tokens = step_tokens
        self._max_running = max_running
        self._cohorts = cohorts
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=lambda item: item.order)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended: its blocks are free (or cached) from now on."""
        if sequence in self._running:
            self._running.remove(sequence)
            sequence.give_up_blocks(self.pool)
        else:
            self._waiting.remove(sequence)

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Every unfinished sequence of a request."""
        everyone = (*self._running, *self._waiting)
        return [each for each in everyone if each.request.request_id == request_id]

    def drawing(self) -> list[Sequence]:
        """The running sequences that the next step may draw a token for: all but one of their
        tokens are computed."""
        return [
            each
            for each in self._running
            if not each.awaiting and each.computed == len(each.token_ids) - 1
        ]

    def plan(self) -> StepPlan:
        """The next step; empty when nothing can be computed."""
        budget = self._step_tokens
        chunks: list[Chunk] = []
        preempted = False
        position = 0
        draws = -(-len(self._running) // self._cohorts)
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            count = min(sequence.uncomputed, budget)
            if sequence.awaiting or (draws == 0 and _chunk(sequence, count).draws):
                position += 1
                continue
            while not self._reserve(sequence, sequence.computed + count):
                victim = self._running.pop()
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    break
            else:
                chunks.append(_chunk(sequence, count))
                budget -= count
                draws -= chunks[-1].draws > 0
            position += 1
        if not preempted:
            self._admit(chunks, budget)
        return StepPlan(tuple(chunks))

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Let waiting sequences in while there is budget and room."""
        position = 0
        while position < len(self._waiting) and budget > 0:
            if len(self._running) >= self._max_running:
                return
            sequence = self._waiting[position]
            if sequence.awaiting or self._prompt_is_coming(sequence):
                position += 1
                continue
            sequence.prompt_logprobs.clear()  # of a run that was preempted
            sequence.take_cached_prefix(self.pool)
            count = min(sequence.uncomputed, budget)
            if not self._reserve(sequence, sequence.computed + count):
                sequence.give_up_blocks(self.pool)
                return
            del self._waiting[position]
            insort(self._running, sequence, key=lambda item: item.order)
            chunks.append(_chunk(sequence, count))
            budget -= count

    def _prompt_is_coming(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the very prompt this one could share."""
        parameters = sequence.request.parameters
        if sequence.prompt_length <= BLOCK_TOKENS or parameters.prompt_logprobs is not None:
            return False
        if not self.pool.shares_prefixes:
            return False
        shareable = (sequence.prompt_length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return any(
            other.computed < shareable and other.request.prompt_ids == sequence.request.prompt_ids
            for other in self._running
        )

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for ``tokens`` tokens in all, or change nothing."""
        missing = -(-tokens // BLOCK_TOKENS) - len(sequence.blocks)
        if missing > self.pool.available:
            return False
        sequence.blocks.extend(self.pool.allocate() for _ in range(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        sequence.give_up_blocks(self.pool)
        self.preemptions += 1
        self.add(sequence)


def _chunk(sequence: Sequence, count: int) -> Chunk:
    parameters = sequence.request.parameters
    beyond = sequence.computed + count - len(sequence.token_ids)
    return Chunk(
        sequence=sequence,
        start=sequence.computed,
        count=count,
        draws=beyond + 1 if beyond >= 0 and parameters.max_tokens > 0 else 0,
        scores=(
            parameters.prompt_logprobs is not None
            and sequence.computed < sequence.prompt_length
            and not sequence.request.resumed_ids
        ),
        drafted=tuple(sequence.drafted[:beyond]) if beyond > 0 else (),
    )
