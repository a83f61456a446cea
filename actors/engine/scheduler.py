"""Who computes how many tokens in the next step.

First come, first served within a priority, as long as there is one client; several share
(`actors.engine.fair_share`). A step has a budget of tokens; a sequence that is one token behind
decodes, one that is a thousand behind takes a chunk of the budget: nothing else tells prompt and
output apart. A lower priority value goes first. Within a priority decoding goes first, then
prompts: of the budget that is left every client gets an equal part, and what one does not use goes
to the others.

When blocks run out, the sequence that is last in order gives up its blocks and computes them again
later (its tokens are kept, and a batch-invariant body gives the same continuation): of several
clients' the last one of who runs most. In the same way a client that has just come gets its first
place, and blocks, from one that runs more than an equal part of all; later it waits for its turn.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heapreplace

from lexshard.actors.engine.fair_share import FairShare
from lexshard.actors.engine.prompt_scores import SharedScores
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.step_plan import NO_ROWS, Chunk, StepDraft, StepPlan, next_chunk
from lexshard.actors.kv_cache import BLOCK_TOKENS, BlockHash, BlockPool, block_hash, first_parent

ByClient = dict[str, list[Sequence]]


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
        self._places: Counter[str] = Counter()  # running sequences by client
        self._shares: dict[int, FairShare] = {}  # by priority
        self._of_requests: dict[str, list[Sequence]] = {}  # every unfinished sequence
        self._scores = SharedScores()
        # Of waiting sequences that found too few blocks: what their chunk would have cost, how many
        # must have come back first, and the name of the block behind their cached prefix.
        self._short: dict[Sequence, tuple[int, int, BlockHash]] = {}
        self._came_back = 0  # blocks, of all that stopped

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return sum(share.waiting_count for share in self._shares.values())

    @property
    def idle(self) -> bool:
        return not self._shares

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for its turn."""
        sequence.scores = self._scores.of(sequence.request)
        self._shares.setdefault(sequence.request.priority, FairShare()).open(sequence)
        self._of_requests.setdefault(sequence.request.request_id, []).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended: its blocks are free (or cached) from now on."""
        priority = sequence.request.priority
        share = self._shares[priority]
        if sequence in self._running:
            self._stop(sequence)
        else:
            share.leave(sequence)
            self._short.pop(sequence, None)
        share.close(sequence)
        if share.idle:
            del self._shares[priority]
        siblings = self._of_requests[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._of_requests[sequence.request.request_id]

    def sequences_of(self, request_id: str) -> list[Sequence]:
        """Every unfinished sequence of a request."""
        return list(self._of_requests.get(request_id, ()))

    def check(self) -> None:
        """Raise RuntimeError unless sequences, places and blocks add up (between two steps)."""
        self.pool.check()
        waiting = [
            sequence
            for share in self._shares.values()
            for client in share.waiting_clients
            for sequence in share.waiting(client)
        ]
        known = {sequence for siblings in self._of_requests.values() for sequence in siblings}
        if known != {*self._running, *waiting}:
            raise RuntimeError(f"{len(known)} sequences are unfinished, others run or wait")
        if self._places != Counter(each.request.client for each in self._running):
            raise RuntimeError(f"places do not add up: {self._places}")
        held = {block for sequence in self._running for block in sequence.blocks}
        if len(held) != self.pool.used or any(sequence.blocks for sequence in waiting):
            raise RuntimeError(f"{self.pool.used} KV blocks are in use, {len(held)} are held")

    def waits_for(self, sequence: Sequence) -> str | None:
        """What an unfinished sequence that is in no plan for long waits for; None where that is
        nothing: one that runs is computed or decided."""
        if sequence in self._running:
            return "drafts" if sequence.held else "its grammar" if sequence.masking else None
        if self._prompt_is_coming(sequence):
            return "another choice that computes its prompt"
        if len(self._running) >= self._max_running:
            return "a place"
        return "KV blocks" if self._running else None

    def drawing(self) -> list[Sequence]:
        """The running sequences that the next step may draw a token for, held ones among them: all
        but one of their tokens are computed."""
        return [
            each
            for each in self._running
            if each.caught_up and not each.awaiting and not each.masking
        ]

    def plan(self) -> StepPlan:
        """The next step; empty when nothing can be computed."""
        step = StepDraft(self._step_tokens, -(-len(self._running) // self._cohorts))
        if self._everything_fits():
            for sequence in tuple(self._running):
                if not sequence.awaiting:
                    self._compute(step, sequence, step.budget)
        else:
            self._share_out(step)
        return StepPlan(tuple(step.chunks.values()))

    def follow(self, plan: StepPlan) -> StepPlan | None:
        """The step after ``plan``, whose chunks draw a token each, before these are known: one more
        token of every sequence that goes on for certain. None where another step may come next,
        or there are no blocks."""
        if self._others_may_follow(plan):
            return None
        step, pays = StepDraft(self._step_tokens, len(plan.chunks)), self._some_wait
        for chunk in plan.chunks:
            sequence = chunk.sequence
            most = sequence.request.parameters.max_tokens
            if not sequence.blocks or sequence.output_length + 1 >= most:
                continue
            if not self._reserve(sequence, chunk.start + 2):
                return None
            step.put(Chunk(sequence, chunk.start + 1, 1, 1, NO_ROWS))
            if pays:
                _charge(self._shares[sequence.request.priority], sequence.request.client, step)
        return StepPlan(tuple(step.chunks.values())) if step.chunks else None

    def room_for_run(self, plan: StepPlan, most: int) -> int:
        """For how many steps like ``plan``, at most ``most``, its sequences have blocks from now
        on: one where another step may come next."""
        if self._others_may_follow(plan):
            return 1
        blocks = sum(
            max(0, -(-(each.stop - 1 + most) // BLOCK_TOKENS) - len(each.sequence.blocks))
            for each in plan.chunks
        )
        if blocks > self.pool.available:
            return 1
        for chunk in plan.chunks:
            self._reserve(chunk.sequence, chunk.stop - 1 + most)
        return most

    def charge_run(self, plan: StepPlan, ran: StepPlan) -> None:
        """A run that began with ``plan`` computes what is in ``ran``: clients pay for its further
        steps as for any."""
        if self._some_wait:
            step = StepDraft(self._step_tokens, 0)
            for first, chunk in zip(plan.chunks, ran.chunks, strict=True):
                step.put(replace(chunk, draws=chunk.draws - first.draws), first.count)
                request = chunk.sequence.request
                _charge(self._shares[request.priority], request.client, step)

    def _others_may_follow(self, plan: StepPlan) -> bool:
        """Whether the step after ``plan`` may be of other sequences, too: one runs that does more
        than wait for guesses from outside, or one that waits could be let in."""
        planned = {chunk.sequence for chunk in plan.chunks}
        here = self._running
        moving = (each for each in here if not each.held or each.incoming or each.uncomputed)
        if not planned.issuperset(moving):
            return True
        full = len(here) >= self._max_running
        return any(
            share.waiting_clients and (not full or (share.newcomers and self._victims(priority)))
            for priority, share in self._shares.items()
        )

    @property
    def _some_wait(self) -> bool:
        return any(share.waiting_clients for share in self._shares.values())

    def _everything_fits(self) -> bool:
        """Whether none waits and the step has room for all that is to be computed: then there is
        nothing to share, and no client pays."""
        if self._some_wait:
            return False
        return sum(each.cost(0, each.uncomputed) for each in self._running) <= self._step_tokens

    def _share_out(self, step: StepDraft) -> None:
        """Fill the step, priority by priority."""
        decoding: dict[int, ByClient] = {}
        behind: dict[int, ByClient] = {}
        for sequence in self._running:
            if not sequence.awaiting:
                request = sequence.request
                kind = decoding if sequence.decodes else behind
                kind.setdefault(request.priority, {}).setdefault(request.client, []).append(
                    sequence
                )
        for priority in sorted(self._shares):
            share = self._shares[priority]
            if priority in decoding:
                self._divide(step, share, decoding[priority], admits=False)
            if priority in behind or share.waiting_clients:
                self._divide(step, share, behind.get(priority, {}), admits=True)

    def _divide(
        self, step: StepDraft, share: FairShare, running: ByClient, *, admits: bool
    ) -> None:
        """Give every client an equal part of the budget, for its ``running`` sequences in order
        and then, if it ``admits``, for its waiting ones; divide again what some do not use."""
        waiting = share.waiting_clients if admits else ()
        clients = share.in_turn({*running, *waiting} if waiting else running)
        while clients and step.budget > 0:
            turn = clients[: step.budget]
            left = dict.fromkeys(turn, step.budget // len(turn))
            for client in turn:
                for sequence in running.get(client, ()):
                    left[client] -= self._compute(step, sequence, left[client])
                _charge(share, client, step)
            if waiting:
                self._admit(step, share, running, left)
            clients = share.in_turn([each for each in clients if left.get(each, 0) <= 0])

    def _compute(self, step: StepDraft, sequence: Sequence, limit: int) -> int:
        """Plan more tokens of a running sequence, for ``limit`` of the budget; what they cost."""
        limit = min(limit, step.budget)
        if limit <= 0 or not sequence.blocks:  # without blocks: it has just been preempted
            return 0
        before = step.chunks.get(sequence)
        planned = 0 if before is None else before.count
        count = sequence.affordable(planned, limit)
        chunk = next_chunk(sequence, count)
        if count == planned or (chunk.draws and not step.draws):
            return 0
        while not self._reserve(sequence, chunk.start + count):
            if planned:  # what has its part of this step takes no other's blocks for more
                return 0
            if sequence.drafted:  # nor does any sequence for guesses
                sequence.forget_guesses()
                count = sequence.affordable(0, limit)
                chunk = next_chunk(sequence, count)
                continue
            victim = self._last_of_most()
            self._preempt(step, victim)
            step.admits = False
            if victim is sequence:
                return 0
        return step.put(chunk, planned)

    def _admit(
        self, step: StepDraft, share: FairShare, running: ByClient, left: dict[str, int]
    ) -> None:
        """Let waiting sequences in while there is room, one by one of the client that was served
        least and has something ``left``. They are ``running`` from then on."""
        full = len(self._running) >= self._max_running
        clients = {
            client
            for client in share.waiting_clients
            if left.get(client, 0) > 0 and (client in share.newcomers or not full)
        }
        if not clients or not step.admits:
            return
        candidates = {client: self._admissible(share, client) for client in clients}
        # In order, and so a heap.
        turns = [(share.served(each), i, each) for i, each in enumerate(share.in_turn(clients))]
        while turns and step.budget > 0:
            _, place, client = turns[0]
            sequence = next(candidates[client], None)
            full = len(self._running) >= self._max_running
            if sequence is None or (full and not self._make_room(step, share, sequence)):
                heappop(turns)
                continue
            chunk = self._first_chunk(sequence, min(left[client], step.budget))
            if chunk is None:
                self._make_room(step, share, sequence)
                step.admits = False  # none overtakes the one that waits for blocks
                return
            share.admit(sequence)
            sequence.start()
            insort(self._running, sequence, key=lambda each: each.order)
            self._places[client] += 1
            running.setdefault(client, []).append(sequence)
            step.draws += 1
            if chunk.count:
                left[client] -= step.put(chunk)
            _charge(share, client, step)
            if left[client] > 0:
                heapreplace(turns, (share.served(client), place, client))
            else:
                heappop(turns)

    def _first_chunk(self, sequence: Sequence, limit: int) -> Chunk | None:
        """The first chunk of a waiting sequence, for ``limit`` of the budget, with its blocks; None
        where these are too few. Its cached prefix, which may be long, is looked up again where less
        would be computed, enough blocks have come back, or another has computed what is behind it:
        that cached blocks are lost, or used by others, frees none for it."""
        cost, enough, behind = self._short.get(sequence, (0, 0, b""))
        if cost <= limit and self._came_back < enough and self.pool.find(behind) is None:
            return None
        sequence.take_cached_prefix(self.pool)
        chunk = next_chunk(sequence, sequence.affordable(0, limit))
        if self._reserve(sequence, chunk.stop):
            self._short.pop(sequence, None)
            return chunk
        missing = -(-chunk.stop // BLOCK_TOKENS) - len(sequence.blocks) - self.pool.available
        parent = (first_parent(sequence.request.cache_salt), *sequence.names)[-1]
        behind = block_hash(parent, sequence.token_ids[chunk.start : -1][:BLOCK_TOKENS])
        cost = sequence.cost(0, chunk.count)
        self._short[sequence] = cost, self._came_back + missing, behind
        sequence.give_up_blocks(self.pool)
        return None

    def _admissible(self, share: FairShare, client: str) -> Iterator[Sequence]:
        """The waiting sequences of a client that could be computed now."""
        for sequence in share.waiting(client):
            waits = sequence.masking and sequence.uncomputed == 0  # for all there is to compute
            if not (sequence.awaiting or waits or self._prompt_is_coming(sequence)):
                yield sequence

    def _prompt_is_coming(self, sequence: Sequence) -> bool:
        """Whether another choice of the same client is computing the very prompt this one could
        share. No sequence waits for other clients or for less urgent ones."""
        if sequence.prompt_length <= BLOCK_TOKENS or not self.pool.shares_prefixes:
            return False
        shareable = (sequence.prompt_length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return any(
            other.computed < shareable and other.makes_prompt_of(sequence)
            for other in self._running
        )

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks for ``tokens`` tokens in all, or change nothing."""
        missing = -(-tokens // BLOCK_TOKENS) - len(sequence.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.available:
            return False
        sequence.blocks.extend(self.pool.allocate() for _ in range(missing))
        return True

    def _make_room(self, step: StepDraft, share: FairShare, sequence: Sequence) -> bool:
        """Take the place and the blocks of another client's last sequence for one of a client that
        has just come, where the other runs more than an equal part of all; whether there is one."""
        if sequence.request.client not in share.newcomers:
            return False
        victims = self._victims(sequence.request.priority)
        if victims:
            self._preempt(step, max(victims, key=self._dispensability))
        return bool(victims)

    def _victims(self, priority: int) -> list[Sequence]:
        """Who may lose its place to a newcomer of a ``priority``."""
        clients = {*self._places}.union(*(each.waiting_clients for each in self._shares.values()))
        part = -(-len(self._running) // len(clients))
        return [
            each
            for each in self._running
            if each.request.priority >= priority and self._places[each.request.client] > part
        ]

    def _last_of_most(self) -> Sequence:
        """Who gives up its blocks when there are none: of the last priority, the last sequence of
        the client that has most of them."""
        return max(self._running, key=self._dispensability)

    def _dispensability(self, sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        return request.priority, self._places[request.client], sequence.arrival

    def _preempt(self, step: StepDraft, sequence: Sequence) -> None:
        share = self._shares[sequence.request.priority]
        share.charge(sequence.request.client, -step.drop(sequence))
        self._stop(sequence)
        self.preemptions += 1
        share.wait(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """A running sequence leaves its place and gives up its blocks."""
        client = sequence.request.client
        self._running.remove(sequence)
        self._places[client] -= 1
        if not self._places[client]:
            del self._places[client]
        before = self.pool.available
        sequence.give_up_blocks(self.pool)
        self._came_back += self.pool.available - before


def _charge(share: FairShare, client: str, step: StepDraft) -> None:
    share.charge(client, step.served)
    step.served = 0
