"""The engine: continuous batching over a body, a head and a sampler.

    engine = Engine(EngineConfiguration(model="models/lexshard-demo"))
    engine.generate(["Once upon a time"], SamplingParameters(max_tokens=64))

``step()`` is the whole story: plan, forward, decide, commit (`actors.engine.steps`). A plain class:
it runs in this process in tests and scripts, and in a process of its own behind the server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.body.loading import LoadedModel, choose_device, load
from lexshard.actors.body.parallel.checks import check_ranks
from lexshard.actors.configuration import (
    NGRAM,
    EngineConfiguration,
    check_utilization,
)
from lexshard.actors.decision.build import StartSampler, build_plane, sampler_settings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.plane import DecisionPlane
from lexshard.actors.drafter.checks import check_drafting
from lexshard.actors.drafter.length import length_rule
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.engine.completion import Completion, run_to_completion
from lexshard.actors.engine.constraints import Constraints, check_constraints
from lexshard.actors.engine.scheduler import Scheduler
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.engine.speculation import CostTiming, Speculation
from lexshard.actors.engine.start.accelerator import measure_device
from lexshard.actors.engine.start.information import describe_engine, files_of
from lexshard.actors.engine.start.memory import default_kv_bytes, device_kv_bytes
from lexshard.actors.engine.start.remembered_timings import RememberedTimings
from lexshard.actors.engine.start.warm_up import sized_requests, warm_up_requests
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.engine.steps import Steps
from lexshard.actors.engine.threads.choice import EngineThreads
from lexshard.actors.grammar.grammars import Grammars
from lexshard.actors.head.build import build_head
from lexshard.actors.head.sharded.checks import check_shards
from lexshard.actors.kv_cache import BLOCK_TOKENS, BlockPool
from lexshard.actors.messages import (
    Drafts,
    EngineStatistics,
    Request,
    SamplingParameters,
    SequenceEvent,
)
from lexshard.actors.role import RunningRole, here
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.actors.text.codec import TextCodec
from lexshard.kernels.ahead import GUESSING, is_postponed

if TYPE_CHECKING:
    import torch

    from lexshard.actors.body.parallel.loading import StartRanks
    from lexshard.actors.body.parallel.parallel_body import ParallelBody
    from lexshard.actors.head.sharded.recovering_head import ShardStarter

MOST_INCOMING = 16  # drafts from outside that wait for their turn, of a sequence


class Engine:
    """Serves sequences step by step. Not thread-safe: one thread plans, finishes and submits.

    ``start_sampler``, ``shard_starter`` and ``start_ranks`` start samplers, shards and ranks of the
    body outside of this process; ``drafter`` stands in the place of the configuration's. ``tell``
    hears what takes time at the start.

    Raises what ``actors.body.loading.load`` raises (``ModelRefusedError``) and ValueError for
    settings that cannot work together.
    """

    def __init__(
        self,
        configuration: EngineConfiguration,
        start_sampler: StartSampler | None = None,
        drafter: Drafter | None = None,
        shard_starter: ShardStarter | None = None,
        tell: Callable[[str], None] = lambda phase: None,
        start_ranks: StartRanks | None = None,
    ) -> None:
        self._tell = tell
        check_drafting(configuration)
        check_shards(configuration)
        check_ranks(configuration)
        check_utilization(configuration.gpu_memory_utilization)
        if configuration.tiers:  # what cannot be is told before weights are read
            configuration.tiers_of(on_gpu=choose_device(configuration.device).type != "cpu")
        of_gpu = configuration.no_compile or configuration.attention != "auto"
        if of_gpu and choose_device(configuration.device).type == "cpu":
            tell("no GPU: --no-compile and --attention have no effect")
        if configuration.samplers and choose_device(configuration.device).type != "cpu":
            tell("--samplers halve every step, and each half reads all weights: not for a GPU")
        self._timings = RememberedTimings(configuration)
        threads = EngineThreads(configuration, time_threads=self._timings.time_threads)
        tell("loading the weights")
        files = files_of(configuration)  # before: what changes meanwhile is other files'
        model = _loaded(configuration, start_ranks)
        self.configuration = configuration
        self.model = model
        self.max_model_len = _context_length(configuration, model)
        self._body = model.body
        tell("preparing the head: index, timings of threads and screens")
        self._states = SequenceStates(
            model.vocabulary_size, model.eos_token_ids, configuration.max_running
        )
        built = build_head(
            model,
            configuration,
            self._states,
            partial(threads.choose, model.body),
            shard_starter,
            self._timings.calibrate,
        )
        self._head = built.head
        self._scheduler = self._make_scheduler()
        self._plane = self._make_plane(start_sampler)
        if configuration.draft is not None and drafter is None:
            from lexshard.actors.drafter.build import (
                build_drafter,
            )  # with what a bare GPU machine lacks

            tell("loading the draft model")
            drafter = build_drafter(
                configuration,
                blocks=self._scheduler.pool.count,
                vocabulary_size=model.vocabulary_size,
            )
        self._speculation = None if drafter is None else self._make_speculation(drafter)
        vocabulary = model.vocabulary_size, model.eos_token_ids
        self._grammars = Grammars(configuration.model, *vocabulary)
        self._constraints = Constraints(*vocabulary)
        self.steps = Steps(
            model,
            built,
            self._plane,
            self._states,
            self._scheduler,
            constraints=self._constraints,
            overlaps=self.overlaps,
            draws_ahead=self._draws_ahead(built.device),
            steps_at_once=self._steps_at_once(built.device),
            speculation=self._speculation,
        )
        self._codec: TextCodec | None = None
        self._arrivals = 0
        self.information = describe_engine(
            configuration,
            model,
            built,
            threads,
            drafter,
            files=files,
            max_model_len=self.max_model_len,
            blocks=self._scheduler.pool.count,
        )

    def _make_plane(self, start_sampler: StartSampler | None) -> DecisionPlane | OwnDecisions:
        configuration, model = self.configuration, self.model
        settings = sampler_settings(configuration, model.vocabulary_size, model.eos_token_ids)
        return build_plane(settings, configuration, self._states, start_sampler)

    def _make_speculation(self, drafter: Drafter) -> Speculation:
        configuration = self.configuration
        return Speculation(
            drafter,
            lambda tested: length_rule(configuration, by_distribution=tested),
        )

    def _make_scheduler(self) -> Scheduler:
        configuration = self.configuration
        block_bytes = self._body.kv_bytes_per_block()
        kv_bytes = configuration.kv_cache_bytes or self._automatic_kv_bytes(block_bytes)
        blocks = kv_bytes // block_bytes
        if blocks * BLOCK_TOKENS < self.max_model_len:
            wanted = -(-self.max_model_len // BLOCK_TOKENS) * block_bytes
            raise ValueError(
                f"{kv_bytes} bytes of KV cache hold {blocks * BLOCK_TOKENS} tokens, fewer than one "
                f"sequence of {self.max_model_len}: raise --kv-cache-memory to at least {wanted} "
                "bytes or lower --max-model-len"
            )
        self._body.allocate_cache(blocks)
        return Scheduler(
            BlockPool(blocks, prefix_cache=configuration.prefix_cache),
            step_tokens=self.step_tokens,
            max_running=configuration.max_running,
            cohorts=2 if self.overlaps else 1,
        )

    def _automatic_kv_bytes(self, block_bytes: int) -> int:
        configuration = self.configuration
        wanted = (block_bytes, self.max_model_len, configuration.max_running)
        if self._body.device.type == "cpu":
            return default_kv_bytes(*wanted)
        memory = measure_device(self._body, self.step_tokens)
        return device_kv_bytes(*wanted, memory, configuration.gpu_memory_utilization)

    @property
    def step_tokens(self) -> int:
        """How many tokens a step computes at most."""
        return self.configuration.tokens_of_a_step(self._body.device.type)

    @property
    def overlaps(self) -> bool:
        """Whether decisions are made beside the next step's forward pass, of other sequences."""
        return self.configuration.samplers > 0

    def _draws_ahead(self, head_device: torch.device) -> bool:
        """Whether steps begin from what the head's device has drawn: where it is the body's, in
        this process, and nothing else guesses tokens."""
        parts = self.configuration.samplers or self.configuration.shards > 1
        ranks = self.configuration.tensor_parallel is not None
        alone = not parts and not ranks and self._speculation is None
        return alone and head_device.type != "cpu" and self._body.device == head_device

    def _steps_at_once(self, head_device: torch.device) -> int:
        """How many steps may be taken before one is booked: one where shards elsewhere must hear of
        each token, or a GPU computes."""
        on_cpu = self._body.device.type == head_device.type == "cpu"
        return self.configuration.steps_at_once if on_cpu and self.configuration.shards == 1 else 1

    def close(self) -> None:
        """End samplers, shards and ranks; the engine is of no use any more."""
        self._grammars.close()
        self._constraints.close()
        self._plane.shut_down()
        self._head.shut_down()
        if (shared := self._parallel_body) is not None:
            shared.close()

    @property
    def _parallel_body(self) -> ParallelBody | None:
        if self.configuration.tensor_parallel is None:
            return None
        from lexshard.actors.body.parallel.parallel_body import ParallelBody

        assert isinstance(self._body, ParallelBody)
        return self._body

    @property
    def _recorded_body(self) -> GraphedBody | ParallelBody | None:
        """What records its steps."""
        return self._body if isinstance(self._body, GraphedBody) else self._parallel_body

    def warm_up(self) -> None:
        """Compile and run every kernel once that is not postponed (`kernels.ahead`), then forget
        it: cache and counts are as new. What grammars need of the tokenizer is made beside it."""
        self._tell("warming up: every kernel once")
        tokenizer = self._grammars.start()
        rounds = warm_up_requests(
            self.max_model_len,
            self.configuration.max_running,
            self.step_tokens,
            self.model.vocabulary_size,
            sizes_matter=self._body.device.type != "cpu",
        )
        if self._speculation is not None:  # runs of steps, too, which guesses would leave out
            self._speculation.forced_length = 0
            run_to_completion(self, rounds[0])
            self._speculation.forced_length = None
        for requests in rounds:
            run_to_completion(self, requests)
        wait(tokenizer)  # before anything is timed; a failure is told of with the first grammar
        if (recorded := self._recorded_body) is not None:
            blocks = -(-self.max_model_len // BLOCK_TOKENS)
            recorded.record(self.configuration.max_running, blocks)
        # Of a drafter that is still compiled it is learnt as drafts come; the next start measures.
        if self._speculation is not None and not is_postponed(GUESSING):
            self._learn_costs(self._speculation)
        self._scheduler.pool.drop_cache()
        if self._body.device.type == "cpu":  # on a GPU what was recorded knows where the cache is
            self._body.allocate_cache(self._scheduler.pool.count)  # of pages not written to yet
        self.steps.booking.counters = Counters()

    def _learn_costs(self, speculation: Speculation) -> None:
        """What steps and guesses cost, which tells whether guessing pays."""

        def measure() -> list[CostTiming]:
            speculation.restart()
            sized = sized_requests(self.configuration.max_running, self.max_model_len)
            for speculation.forced_length in (0, 2):
                for requests in sized:
                    run_to_completion(self, requests)
            speculation.forced_length = None
            return speculation.timings

        speculation.restart(self._timings.measure_costs(measure))

    # -- requests ---------------------------------------------------------------------------------

    def prepared(self, request: Request, wait_seconds: float = 0.0) -> bool:
        """Whether a request can be submitted without a wait, now or within ``wait_seconds``; begins
        to prepare it where it has a grammar that is not known yet."""
        grammar = request.parameters.grammar
        return grammar is None or self._grammars.ready(grammar, wait_seconds)

    def submit(self, request: Request) -> SequenceEvent | None:
        """Queue a sequence; returns an event if it ends at once: an error if it can never be
        served, all of its output where a grammar says it."""
        matcher = None
        try:
            self._check(request)
            if request.parameters.grammar is not None and request.parameters.max_tokens:
                matcher = self._grammars.matcher(request.parameters.grammar)
                matcher.consume(request.resumed_ids)
            state = self._states.open(self._arrivals + 1, request)
        except ValueError as error:
            return SequenceEvent.failure(request, str(error), refused=True)
        self._arrivals += 1
        self._plane.open(self._arrivals, request, state.history)
        self._head.open(self._arrivals, request, state.history)
        sequence = Sequence(
            request,
            self._arrivals,
            state,
            state.history,
            verify=request.drafting.verify or self.configuration.verify,
            held=request.drafting.drafter == "client" and bool(request.resumed_ids),
            matcher=matcher,
        )
        self._scheduler.add(sequence)
        return self.steps.booking.begin(sequence)

    def draft(self, drafts: Drafts) -> None:
        """Guesses from outside for a sequence that waits for them, or soon will. Those that cannot
        be tested count as none; those for others, and more than it can have use for, are dropped.
        """
        for sequence in self._scheduler.sequences_of(drafts.request_id):
            if sequence.request.choice == drafts.choice and sequence.drafter == "client":
                if not self._can_test(sequence, drafts):
                    drafts = replace(drafts, token_ids=(), proposals=())
                if len(sequence.incoming) < MOST_INCOMING:
                    sequence.hear(drafts)

    def _can_test(self, sequence: Sequence, drafts: Drafts) -> bool:
        ids = itertools.chain(drafts.token_ids, *(each.ids for each in drafts.proposals))
        known = all(0 <= token_id < self.model.vocabulary_size for token_id in ids)
        return known and (sequence.verify != "sigmoid" or bool(drafts.proposals))

    def _check(self, request: Request) -> None:
        length, wanted = len(request.prompt_ids), request.parameters.max_tokens
        vocabulary_size = self.model.vocabulary_size
        if length == 0:
            raise ValueError("the prompt is empty")
        if length + wanted > self.max_model_len:
            raise ValueError(
                f"{length} prompt tokens and {wanted} to generate exceed the context of "
                f"{self.max_model_len} tokens"
            )
        check_constraints(request.parameters)
        if request.drafting.verify == "sigmoid" and self.configuration.draft == NGRAM:
            raise ValueError("sigmoids compare what guesses were drawn from, which n-grams are not")
        if not -(2**63) <= request.parameters.seed < 2**64:
            raise ValueError(f"seed {request.parameters.seed} does not fit 64 bits")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary_size:
            raise ValueError(f"a prompt token id is outside 0 to {vocabulary_size - 1}")

    def cancel(self, request_id: str) -> None:
        """End every sequence of a request now; its blocks are free for the next step."""
        self.steps.booking.cancel(request_id)

    def generate(
        self,
        prompts: Sequenced[str | Sequenced[int]],
        parameters: SamplingParameters,
        *,
        stop: Sequenced[str] = (),
    ) -> list[Completion]:
        """Run prompts (text or token ids) to their end in one continuous batch, in order.

        ``stop`` strings end a completion's text before them. Models without a tokenizer take
        token ids only, and their completions have no text.
        """
        codec = self._text_codec()
        if codec is None and (stop or any(isinstance(prompt, str) for prompt in prompts)):
            raise ValueError(f"{self.configuration.model} has no tokenizer: give token ids")
        requests = []
        for index, prompt in enumerate(prompts):
            token_ids = codec.encode(prompt) if codec and isinstance(prompt, str) else prompt
            name = f"generate-{self._arrivals}-{index}"
            requests.append(Request(name, 0, tuple(map(int, token_ids)), parameters))
        if codec is None:
            return run_to_completion(self, requests)
        return run_to_completion(
            self, requests, partial(codec.detokenizer, stop, parameters.min_tokens)
        )

    def _text_codec(self) -> TextCodec | None:
        if self._codec is None:
            self._codec = TextCodec.load(self.configuration.model)
        return self._codec

    def statistics(self) -> EngineStatistics:
        return self.steps.counters.snapshot(
            self._scheduler, self._plane.counters, self._head.counters
        )

    def roles(self) -> list[RunningRole]:
        """Who does what, and where. May be asked from another thread."""
        device = str(self.model.body.device)
        roles = [RunningRole("body", 0, here(), device, f"{self.information.body}, {device}")]
        if (shared := self._parallel_body) is not None:
            roles.extend(shared.roles())
        if self._speculation is not None:
            roles.append(RunningRole("drafter", 0, here(), "cpu", self.information.drafts))
        return [*roles, *self._head.roles(), *self._plane.roles()]

    def sequences(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request."""
        return self._scheduler.sequences_of(request_id)

    def waits_for(self, sequence: Sequence) -> str | None:
        """See `Scheduler.waits_for`."""
        return self._scheduler.waits_for(sequence)

    def check_idle(self) -> None:
        """Raise RuntimeError if blocks, places or sequences do not add up, or an idle engine holds
        anything."""
        self._scheduler.check()
        self.steps.check_rest()

    def step(self) -> list[SequenceEvent]:
        """Plan, forward, decide, commit; what clients are told (see `Steps.step`)."""
        return self.steps.step()


def _loaded(configuration: EngineConfiguration, start_ranks: StartRanks | None) -> LoadedModel:
    if configuration.tensor_parallel is not None:
        # Needs msgspec, which is not everywhere.
        from lexshard.actors.body.parallel.loading import ParallelOptions, load_parallel

        options = ParallelOptions(
            configuration.tensor_parallel,
            configuration.dtype,
            configuration.body,
            configuration.attention,
            configuration.device,
            configuration.batch_invariant,
            not configuration.no_compile,
        )
        return load_parallel(configuration.model, options, start_ranks)
    return load(
        configuration.model,
        configuration.dtype,
        body=configuration.body,
        batch_invariant=configuration.batch_invariant,
        compiled=not configuration.no_compile,
        attention=configuration.attention,
        device=configuration.device,
    )


def _context_length(configuration: EngineConfiguration, model: LoadedModel) -> int:
    most = model.body.max_positions
    wanted = configuration.max_model_len
    if wanted is not None and wanted > most:
        raise ValueError(
            f"--max-model-len {wanted} is more than the {most} positions the model knows"
        )
    return wanted or most
