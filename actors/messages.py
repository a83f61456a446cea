"""What the roles say to each other: frozen dataclasses, one per message.

Every message is plain data (ints, floats, strings, tuples, numpy arrays), so that the same class
travels by reference inside one process and by msgpack or shared memory across a wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from lexshard.actors.statistic import counter, gauge, histogram

FinishReason = Literal["stop", "length", "abort", "error"]
NeedKind = Literal[
    "top1", "topk", "minp", "nucleus", "nucleus-draw", "epsilon", "dense", "labels", "forced"
]
NUCLEUS_NEEDS: tuple[NeedKind, ...] = ("nucleus", "nucleus-draw")
Guarantee = Literal["deterministic", "probabilistic", "relaxed", "dense"]
# How guesses are tested. "same-token": a guess stands if the target draws it: when tokens come
# changes, never which. "greedy": the same, for sequences at temperature 0 only.
# "same-distribution": what guesses were drawn from is tested against the target's distribution,
# which each token has; which token it is depends on the guesses. "sigmoid": the papers'
# approximation of that, which is not exact.
VerifyMode = Literal["same-token", "greedy", "same-distribution", "sigmoid"]
BY_DISTRIBUTION: tuple[VerifyMode, ...] = ("same-distribution", "sigmoid")
# The tier of rows whose few allowed tokens are all computed, and of those that have only one.
MASK_TIER = "mask"
LARGEST_LOGIT = 1e30  # of guesses from outside: fp32 holds it, and sums of many


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one sequence is sampled and when it ends (values already validated at the edge).

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 are off.
    ``logprobs`` None is off, 0 asks for the chosen token alone. ``seed`` is always given: the
    front end draws one for requests that name none. ``stop`` strings are applied where text is
    made (the detokeniser), never in the engine loop. ``grammar`` is what the whole output must be,
    as llguidance reads it (`actors.grammar`): it allows ids step by step, in place of
    ``allowed_ids``. Where these are ``labels``, log-probabilities are those of a softmax over them
    alone, and no other logit is computed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    labels: bool = False
    grammar: str | None = None
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    certificate: bool = False
    draft: bool = False
    receipt: bool = False

    def end_with(
        self, token_id: int, length: int, eos_token_ids: tuple[int, ...]
    ) -> tuple[FinishReason | None, int | None]:
        """Why an output ends whose ``length``-th token is this one, and the stop token if that is
        one that was asked for; None where it goes on."""
        if length >= self.min_tokens:
            if token_id in self.stop_token_ids:
                return "stop", token_id
            if not self.ignore_eos and token_id in eos_token_ids:
                return "stop", None
        return ("length" if length >= self.max_tokens else None), None


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where the guesses for one sequence come from, and how they are tested.

    ``drafter`` is the engine's own, if it has one, "none", or "client": then guesses come from
    outside (`Drafts`), and after its first token the sequence waits for them. ``verify`` None is
    the engine's mode. A draft is of ``most`` guesses at most, None: of as many as the engine takes.
    """

    drafter: Literal["engine", "none", "client"] = "engine"
    verify: VerifyMode | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    ``choice`` is the index among the ``n`` choices of one client request; with the seed it
    gives the random key (`actors.states.noise_key`). ``resumed_ids`` are output tokens a client has
    already received (replay after a restart): they count as output, not as prompt. ``client`` is
    who asked: within a priority, clients share the engine equally. ``cache_salt`` names the prefix
    cache the prompt may share: requests of different salts never see each other's blocks.
    ``drafting`` is how it is guessed for.
    """

    request_id: str
    choice: int
    prompt_ids: tuple[int, ...]
    parameters: SamplingParameters
    priority: int = 0
    resumed_ids: tuple[int, ...] = ()
    client: str = ""
    cache_salt: str = ""
    drafting: Drafting = Drafting()


def guesses_go_on(position: int, guesses: Sequence[int], token_ids: Sequence[int]) -> bool:
    """Whether ``guesses`` from ``position`` on are guesses behind ``token_ids``: what they begin
    before its end must be what it says there. Others are dropped, with all that are built on
    them."""
    if not guesses:
        return position <= len(token_ids)
    said = tuple(token_ids[position:])
    return position <= len(token_ids) and tuple(guesses[: len(said)]) == said


def guesses_fell(position: int, guesses: Sequence[int], token_ids: Sequence[int]) -> bool:
    """Whether one of ``guesses`` from ``position`` on is not what ``token_ids`` say there."""
    said = tuple(token_ids[position : position + len(guesses)])
    return tuple(guesses[: len(said)]) != said


def guesses_that_stand(guesses: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many of ``guesses``, up to the first that is wrong, are what ``token_ids`` say."""
    pairs = zip(guesses, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """What a guess was drawn from: ``softmax(logits)`` over the distinct ``ids``."""

    ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses from outside at the tokens of one sequence from ``position`` on, an index in its
    prompt and output; without any, the sequence draws its next token unaided.

    ``proposals`` are what the guesses were drawn from, none where their drafter was certain. After
    what these guesses bring, ``alone`` more tokens are drawn unaided before it waits again.
    ``number`` is what `SequenceEvent.answers` calls them. Those that are ``ahead`` are built on the
    guess that all of those before them stand: else they are dropped. Raises ValueError for
    proposals that do not fit the guesses.
    """

    request_id: str
    choice: int
    position: int
    token_ids: tuple[int, ...] = ()
    proposals: tuple[DraftDistribution, ...] = ()
    alone: int = 0
    number: int = 0
    ahead: bool = False

    def go_on_from(self, token_ids: Sequence[int]) -> bool:
        """Whether they are guesses behind ``token_ids``, a prompt and its output."""
        return guesses_go_on(self.position, self.token_ids, token_ids)

    def __post_init__(self) -> None:
        if not self.proposals:
            return
        if len(self.proposals) != len(self.token_ids):
            raise ValueError("there must be one distribution for each guess, or none")
        for token_id, proposal in zip(self.token_ids, self.proposals, strict=True):
            ids, logits = proposal.ids, proposal.logits
            if len(ids) != len(logits) or len(set(ids)) != len(ids):
                raise ValueError("a distribution needs distinct ids and a logit for each")
            if not all(abs(each) <= LARGEST_LOGIT for each in logits) or token_id not in ids:
                raise ValueError(
                    f"a distribution needs logits of at most {LARGEST_LOGIT:g} either way, and the "
                    "guess among its ids"
                )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits (before any processor).

    ``token_id`` and ``logprob`` are the chosen (or prompt) token's, ``rank`` its 1-based rank;
    ``top`` holds the most likely ids in order with their logprobs. ``logit`` and ``top_logits`` are
    the canonical logits of the same, of tokens that were drawn.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    logit: float = 0.0
    top_logits: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Certificate:
    """How a row's candidates are known to be enough, and what finding them cost.

    ``guarantee`` is ``deterministic``, ``probabilistic`` (wrong with at most
    ``failure_probability``), ``relaxed`` (less than was asked for; the paper's mode only) or
    ``dense``: every canonical logit was computed. ``tier`` is what the row was screened with.
    ``opened_share`` is the share of the vocabulary whose canonical logits were computed;
    ``tightness`` the best canonical logit over the best upper bound (the paper's xi, at most 1;
    0 where it says nothing because one of them is not positive). ``fallback`` says that a
    cheaper way was tried first and did not suffice. A token that alone was allowed is ``forced``:
    nothing was computed for it.
    """

    need: NeedKind
    guarantee: Guarantee
    tier: str
    rescored_rows: int
    bytes_read: int
    opened_share: float = 1.0
    fallback: bool = False
    tightness: float = 1.0
    failure_probability: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether top-p has been applied: a draw from the candidates is one from the nucleus."""
        if self.need not in NUCLEUS_NEEDS or self.guarantee == "dense":
            return False
        return self.tier != MASK_TIER


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Where a token came from. ``drafted_by`` names the drafter that had guessed it, None where
    none had, "grammar" where a grammar allowed it alone; ``rejected`` is the guess it was drawn
    instead of, if there was one."""

    drafted_by: str | None = None
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class SequenceTiming:
    """Where the time of one sequence went, in seconds by the engine's clock.

    ``queued`` from its arrival to the first step that computed some of it, ``prefill`` from there
    to its first token. ``verify`` and ``exchange`` are what steps spent on testing guesses and on
    exchanging with other shards since its first token, whichever sequences they were for.
    """

    queued: float
    prefill: float
    verify: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What one step did to one sequence: new tokens, perhaps its end.

    ``certificates`` and ``origins`` are those of ``token_ids``, for requests that ask for them;
    ``logits``, for those that want a receipt, the canonical ones before any processor, NaN of
    tokens that a grammar forced.
    With ``finish_reason`` error, ``error`` says why, and ``refused`` that the request asked for
    something impossible (the client's fault) rather than that something broke (ours). ``timing``
    comes with the first and the last event of a sequence. ``answers`` is the number of the `Drafts`
    that the step took up, None where it took none.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: str | None = None
    refused: bool = False
    certificates: tuple[Certificate, ...] = ()
    origins: tuple[TokenOrigin, ...] = ()
    timing: SequenceTiming | None = None
    answers: int | None = None
    logits: tuple[float, ...] = ()

    @classmethod
    def failure(
        cls, request: Request, error: str, reason: FinishReason = "error", *, refused: bool = False
    ) -> SequenceEvent:
        """The end of a sequence that comes to nothing (more)."""
        name, choice = request.request_id, request.choice
        return cls(name, choice, (), finish_reason=reason, error=error, refused=refused)


@dataclass(frozen=True, slots=True)
class RowDecision:
    """The token drawn for one row, with its log-probabilities where its request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


# Bounds of the time that one phase of one step takes.
STEP_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0),
)


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of the engine for ``/metrics`` and admission.

    A head row is one decision. ``head_certified_rows`` were decided by a certificate without all
    canonical logits and without a dense screen. ``head_opened_share`` and ``head_tightness`` are
    sums over rows (the latter over ``head_tightness_rows``), so that ratios of increases are means.
    `actors.engine.statistics.Counters` holds what is not keyword-only, under the same names.
    """

    steps: int = field(default=0, metadata=counter("Engine steps"))
    running: int = field(default=0, kw_only=True, metadata=gauge("Sequences that hold KV blocks"))
    waiting: int = field(
        default=0,
        kw_only=True,
        metadata=gauge("Sequences that wait for KV blocks or a place in a step"),
    )
    kv_blocks_total: int = field(default=0, kw_only=True, metadata=gauge("KV blocks there are"))
    kv_blocks_used: int = field(
        default=0, kw_only=True, metadata=gauge("KV blocks held by running sequences")
    )
    kv_blocks_cached: int = field(
        default=0, kw_only=True, metadata=gauge("Free KV blocks that still hold a prefix")
    )
    prompt_tokens: int = field(default=0, metadata=counter("Prompt tokens computed"))
    generated_tokens: int = field(default=0, metadata=counter("Tokens drawn, or forced"))
    forced_tokens: int = field(
        default=0, metadata=counter("Tokens that a grammar allowed alone: they took no step")
    )
    cached_prompt_tokens: int = field(
        default=0, metadata=counter("Prompt tokens found in the prefix cache")
    )
    finished_prompt_tokens: int = field(
        default=0,
        metadata=counter("Prompt tokens of finished sequences, computed or found in the cache"),
    )
    preemptions: int = field(
        default=0,
        kw_only=True,
        metadata=counter("Sequences that gave up their KV blocks to others"),
    )
    finished: int = field(default=0, metadata=counter("Sequences that came to their end"))
    cancelled: int = field(default=0, metadata=counter("Sequences whose client left or had enough"))
    body_seconds: float = field(default=0.0, metadata=counter("Seconds in the model body"))
    head_seconds: float = field(default=0.0, metadata=counter("Seconds in the output head"))
    decide_seconds: float = field(
        default=0.0,
        metadata=counter("Seconds the engine's loop spent on decisions: asking, waiting, deciding"),
    )
    draft_steps: int = field(
        default=0, metadata=counter("Steps of a sequence that verified guesses of the drafter")
    )
    draft_tokens: int = field(default=0, metadata=counter("Tokens the drafter guessed"))
    draft_accepted_tokens: int = field(
        default=0, metadata=counter("Guesses of the drafter that stood")
    )
    draft_seconds: float = field(
        default=0.0, metadata=counter("Seconds the engine's loop spent on guessing")
    )
    verify_seconds: float = field(
        default=0.0, metadata=counter("Seconds in the output head of steps that tested guesses")
    )
    sampler_busy_seconds: float = field(
        default=0.0,
        kw_only=True,
        metadata=counter("Seconds samplers spent deciding, summed over the samplers"),
    )
    sampler_wait_seconds: float = field(
        default=0.0, kw_only=True, metadata=counter("Seconds the engine's loop waited for samplers")
    )
    sampler_hidden_seconds: float = field(
        default=0.0,
        kw_only=True,
        metadata=counter("Seconds of the busiest sampler of each step that were not waited for"),
    )
    shards_lost: int = field(
        default=0,
        kw_only=True,
        metadata=counter("Groups of shards that lost one and were formed anew"),
    )
    shard_wait_seconds: float = field(
        default=0.0,
        kw_only=True,
        metadata=counter("Seconds that steps waited for lost shards to be replaced"),
    )
    exchange_calls: dict[str, int] = field(
        default_factory=dict,
        kw_only=True,
        metadata=counter("Exchanges between shards", label="operation"),
    )
    exchange_bytes_sent: dict[str, int] = field(
        default_factory=dict,
        kw_only=True,
        metadata=counter("Bytes the first shard sent to the others", label="operation"),
    )
    exchange_bytes_received: dict[str, int] = field(
        default_factory=dict,
        kw_only=True,
        metadata=counter("Bytes the first shard received from the others", label="operation"),
    )
    exchange_seconds: dict[str, float] = field(
        default_factory=dict,
        kw_only=True,
        metadata=counter(
            "Seconds the first shard spent on exchanges, waiting for the others included",
            label="operation",
        ),
    )
    samplers_lost: int = field(
        default=0, kw_only=True, metadata=counter("Samplers that died and were replaced")
    )
    head_rows: int = field(
        default=0,
        metadata=counter("Rows (one token of one sequence each) the output head has decided"),
    )
    head_certified_rows: int = field(
        default=0, metadata=counter("Head rows decided by a certificate, not by every exact logit")
    )
    head_rescored_rows: int = field(
        default=0, metadata=counter("Exact logits computed, summed over the head rows")
    )
    head_opened_share: float = field(
        default=0.0,
        metadata=counter(
            "Share of the vocabulary (0 to 1) whose exact logits were computed, "
            "summed over the head rows"
        ),
    )
    head_tightness: float = field(
        default=0.0,
        metadata=counter(
            "Best exact logit over best upper bound (0 to 1), "
            "summed over the head rows that have one"
        ),
    )
    head_tightness_rows: int = field(default=0, metadata=counter("Head rows that have a tightness"))
    head_bytes: int = field(
        default=0,
        metadata=counter("Bytes of output weights, exact and low-precision, read by the head"),
    )
    head_fallbacks: int = field(
        default=0,
        metadata=counter("Head rows for which a cheaper way was tried first and did not suffice"),
    )
    head_rows_by_tier: dict[str, int] = field(
        default_factory=dict,
        kw_only=True,
        metadata=counter("Head rows by what they were screened with", label="tier"),
    )
    step_seconds: dict[str, list[float]] = field(
        default_factory=dict,
        kw_only=True,
        metadata=histogram("Seconds of one engine step by phase", "phase", STEP_SECONDS),
    )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one engine step has to tell a front end: one message per step.

    ``statistics`` come with some of them: several times a second, and before the engine rests.
    """

    events: tuple[SequenceEvent, ...] = ()
    statistics: EngineStatistics | None = None


@dataclass(frozen=True, slots=True)
class Commands:
    """What a front end asks of the engine since the last step. ``drafts`` are for sequences that
    wait for guesses from outside. ``stop`` says that it asks for nothing more; an engine whose last
    front end has said so ends."""

    submit: tuple[Request, ...] = ()
    cancel: tuple[str, ...] = ()
    stop: bool = False
    drafts: tuple[Drafts, ...] = ()
