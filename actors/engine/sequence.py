"""One sequence in the engine: its tokens, how far they are computed, and the blocks it holds."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field

from lexshard.actors.engine.prompt_scores import PromptScores
from lexshard.actors.grammar.matcher import Matcher
from lexshard.actors.grammar.step_masks import PendingMasks
from lexshard.actors.kv_cache import BLOCK_TOKENS, BlockHash, BlockPool, block_hash, first_parent
from lexshard.actors.messages import BY_DISTRIBUTION, Drafts, Request, VerifyMode, guesses_fell
from lexshard.actors.proposal import Proposal
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.sequence_state import MOST_AHEAD, SequenceState


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's choice on its way through the engine.

    ``token_ids`` are prompt and output; the keys and values of the first ``computed`` of them are
    in ``blocks``. There is no prefill or decode phase: a step computes some of the tokens that
    are not computed yet, and one that has caught up draws the next token. While that decision, or
    its end, is on its way it is ``awaiting``; ``cancelled`` says that its client has left.

    ``drafted`` are guesses at what follows. They are computed after the sequence's own tokens and
    are none of them: `roll_back` takes them back, no client hears of them, and no block that
    holds one has a name. ``proposals`` are what they were drawn from, where their drafter tells.
    They are tested as ``verify`` says. ``incoming`` are guesses from outside that wait for their
    turn, ``before`` those whose turn came last; one that is ``held`` draws no token before they
    come. ``answers`` is the number of those that it took and has not told of yet, ``alone`` how
    many tokens it may draw before the next.

    ``matcher`` is where it stands in its grammar, if it has one; ``masks`` are those of its rows in
    a step, which are on their way as ``pending_masks``. While it is ``masking`` they are late,
    and it draws no token. Of its last tokens so many are ``forced`` by it that took no step;
    ``untold`` are those that no event has told of.

    ``scores`` are the log-probabilities of the prompt, where they are wanted; other sequences that
    want the same may share them.

    ``arrived_at``, ``started_at`` and ``first_token_at`` are ``time.perf_counter`` seconds: of its
    arrival, its first step and the first event about it.
    """

    request: Request
    arrival: int
    state: SequenceState
    token_ids: list[int]  # the state's own history: one list, appended to by the state
    computed: int = 0
    blocks: array[int] = field(default_factory=lambda: array("i"))
    names: list[BlockHash] = field(default_factory=list)
    cached_tokens: int = 0
    scores: PromptScores | None = None
    drafted: list[int] = field(default_factory=list)
    proposals: Sequenced[Proposal] = ()
    verify: VerifyMode = "same-token"
    incoming: deque[Drafts] = field(default_factory=deque)
    before: Drafts | None = None
    answers: int | None = None
    alone: int = 0
    held: bool = False
    matcher: Matcher | None = None
    pending_masks: PendingMasks | None = None
    masks: Sequenced[Mask] = ()
    masking: bool = False
    untold: tuple[int, ...] = ()
    forced: int = 0
    awaiting: bool = False
    cancelled: bool = False
    arrived_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    spent_before: tuple[float, float] = (0.0, 0.0)  # by the engine, until the first event

    def start(self) -> None:
        """Its first step, or the first after its blocks were taken."""
        if self.started_at is None:
            self.started_at = time.perf_counter()

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def uncomputed(self) -> int:
        """How many tokens, own and drafted ones, are still to be computed; the last one of a
        sequence that is held, or waits for its mask, is not yet."""
        waits = self.held or self.masking
        return len(self.token_ids) + len(self.drafted) - self.computed - waits

    @property
    def caught_up(self) -> bool:
        """Whether all but one of its own tokens are computed, and those that its grammar forced
        since: the next step may draw a token."""
        return 1 <= len(self.token_ids) - self.computed <= 1 + self.forced

    @property
    def decodes(self) -> bool:
        """Whether it is one token behind, and does not still have to tell its prompt's scores."""
        return self.caught_up and (self.scores is None or self.computed >= self.prompt_length)

    @property
    def drafter(self) -> str:
        """Where its guesses come from; see `Drafting`."""
        return self.request.drafting.drafter

    @property
    def tests_guesses(self) -> bool:
        """Whether guesses are tested by distributions. At temperature 0 there is nothing to test:
        the best token stands."""
        return self.verify in BY_DISTRIBUTION and self.state.inverse_temperature > 0

    @property
    def room(self) -> int:
        """How many guesses it has use for: none beyond what it may still say, and of one that is
        penalised few, unless tokens depend on how many: each takes a row of counts."""
        parameters, most = self.request.parameters, self.request.drafting.most
        room = max(0, parameters.max_tokens - self.output_length - 1)
        if self.state.penalised and not self.tests_guesses:
            room = min(room, MOST_AHEAD)
        return room if most is None else min(room, most)

    def hear(self, drafts: Drafts) -> None:
        """Guesses have come from outside."""
        self.incoming.append(drafts)

    def went_on(self, *, draws: int, forced: int, ends: bool) -> None:
        """It has been given tokens: guesses that stand, then those of so many ``draws`` of its own,
        of which the last ones are ``forced``."""
        self.forced = forced
        self.held = self.drafter == "client" and not ends and self.alone < draws
        self.alone = max(0, self.alone - draws)

    def take_guesses(self) -> None:
        """What came from outside for the next token, if anything: then it is held no longer. Of
        those that began before tokens it has meanwhile said the rest is taken. Those that are for
        another text, or built on such, are dropped."""
        while self.incoming and self.answers is None:
            drafts, before = self.incoming.popleft(), self.before
            self.before = drafts
            built = before if drafts.ahead else None
            if built and guesses_fell(built.position, built.token_ids, self.token_ids):
                continue
            if not drafts.go_on_from(self.token_ids):
                continue
            said = len(self.token_ids) - drafts.position
            self.drafted.extend(drafts.token_ids[said:][: self.room])
            proposals = drafts.proposals[said:][: len(self.drafted)]
            self.proposals = tuple(map(Proposal.of, proposals))
            self.answers, self.alone = drafts.number, drafts.alone
            self.held = False

    def keep_guesses(self, count: int) -> None:
        """Of its guesses the first ``count`` are of use."""
        del self.drafted[count:]
        self.proposals = self.proposals[:count]

    def forget_guesses(self) -> None:
        """Guesses that were not computed, or came to nothing, are none any more."""
        self.drafted.clear()
        self.proposals = ()

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.request.priority, self.arrival)

    def affordable(self, planned: int, budget: int) -> int:
        """How many tokens a step may compute that has ``planned`` already and ``budget`` tokens,
        above 0, for more: at least one more where there are any."""
        if self.scores is not None:
            budget = self.scores.affordable(self.computed + planned, budget)
        count = self.uncomputed
        return count if count < planned + budget else planned + budget

    def cost(self, planned: int, count: int) -> int:
        """What computing ``count`` tokens takes of a step's budget of tokens beyond what the first
        ``planned`` of them take."""
        if self.scores is None:
            return count - planned
        return self.scores.cost(self.computed + planned, count - planned)

    def makes_prompt_of(self, other: Sequence) -> bool:
        """Whether the prompt of ``other`` is this one's, of the same client and no less urgent, so
        that ``other`` can have its blocks, and its log-probabilities where it wants them."""
        own, wanted = self.request, other.request
        return (
            own.client == wanted.client
            and own.cache_salt == wanted.cache_salt
            and own.priority <= wanted.priority
            and (other.scores is None or other.scores is self.scores)
            and (own.prompt_ids is wanted.prompt_ids or own.prompt_ids == wanted.prompt_ids)
        )

    def take_cached_prefix(self, pool: BlockPool) -> None:
        """Share the cached blocks that hold a beginning of this sequence.

        The last token is always computed anew: its hidden state is wanted. Prompt scoring wants
        every hidden state whose row is not scored yet.
        """
        most = len(self.token_ids) - 1
        if self.scores is not None and not self.scores.complete:
            most = self.scores.next_row
        name = first_parent(self.request.cache_salt)
        for start in range(0, most - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            name = block_hash(name, self.token_ids[start : start + BLOCK_TOKENS])
            index = pool.find(name)
            if index is None:
                break
            pool.share(index)
            self.blocks.append(index)
            self.names.append(name)
        self.computed = len(self.blocks) * BLOCK_TOKENS
        if self.started_at is None:  # else they are those that it computed before it gave them up
            self.cached_tokens = min(self.computed, self.prompt_length)

    def advance(self, count: int, pool: BlockPool) -> None:
        """``count`` more tokens are computed; publish the blocks that its own tokens fill now."""
        self.computed += count
        self._name_blocks(pool)

    def roll_back(self, length: int, pool: BlockPool) -> None:
        """Keeps what is computed of the first ``length`` tokens, which are its own, and forgets
        every guess. Blocks stay with the sequence: it will soon fill them again."""
        self.computed = min(self.computed, length)
        self.forget_guesses()
        self._name_blocks(pool)

    def _name_blocks(self, pool: BlockPool) -> None:
        own = min(self.computed, len(self.token_ids))
        while len(self.names) < own // BLOCK_TOKENS:
            index = len(self.names)
            parent = self.names[-1] if self.names else first_parent(self.request.cache_salt)
            tokens = self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            self.names.append(block_hash(parent, tokens))
            pool.publish(self.blocks[index], self.names[index])

    def give_up_blocks(self, pool: BlockPool) -> None:
        """Release every block; the tokens stay and can be computed again."""
        pool.release(self.blocks)
        del self.blocks[:]
        self.names.clear()
        self.forget_guesses()
        self.computed = 0
