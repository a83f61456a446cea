"""The engine: continuous batching over a body, a head and a sampler.

    engine = Engine(EngineConfiguration(model="models/lexshard-demo"))
    engine.generate(["Once upon a time"], SamplingParameters(max_tokens=64))

``step()`` is the whole story: plan, forward, head, decide, commit. A plain class: it runs in this
process in tests and scripts, and in a process of its own behind the server.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Sequenced
from functools import partial

import torch

from actors.body.loading import LoadedModel, load
from actors.completion import Completion, run_to_completion
from actors.configuration import EngineConfiguration, EngineInformation
from actors.head import build_head
from actors.kv_cache import BLOCK_TOKENS, BlockPool
from actors.memory import default_kv_bytes
from actors.messages import (
    Certificate,
    EngineStatistics,
    FinishReason,
    Request,
    RowDecision,
    SamplingParameters,
    SequenceEvent,
)
from actors.output_rows import NonFiniteHiddenError
from actors.sampler import AllTokensExcludedError, Sampler, SequenceState
from actors.scheduler import Chunk, Scheduler, StepPlan
from actors.scoring import score_prompt
from actors.sequence import Sequence
from actors.statistics import Counters
from actors.step_batch import build_batch, scored_rows
from actors.text import TextCodec
from actors.warm_up import warm_up_requests
from kernels import pool


class Engine:
    """Serves sequences step by step. Not thread-safe: one thread plans, finishes and submits.

    Raises what ``actors.body.loading.load`` raises (``ModelRefusedError``) and ValueError for
    settings that cannot work together.
    """

    def __init__(self, configuration: EngineConfiguration) -> None:
        threads = configuration.threads or max(1, (os.cpu_count() or 1) - 1)
        torch.set_num_threads(threads)
        pool.set_threads(threads)
        model = load(
            configuration.model,
            configuration.dtype,
            body=configuration.body,
            fast_prefill=configuration.fast_prefill,
            device=configuration.device,
        )
        self.configuration = configuration
        self.model = model
        self.max_model_len = _context_length(configuration, model)
        self._body = model.body
        built = build_head(model, configuration)
        self._head = built.head
        self._head_device = built.device
        self._sampler = Sampler()
        self._scheduler = self._make_scheduler()
        self._codec: TextCodec | None = None
        self._arrivals = 0
        self._counters = Counters()
        blocks = self._scheduler.pool.count
        self.information = EngineInformation(
            model=configuration.model,
            dtype=model.dtype,
            device=str(model.body.device),
            body=model.body.name,
            head=built.description,
            batch_invariant=model.body.batch_invariant,
            threads=threads,
            max_model_len=self.max_model_len,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=model.eos_token_ids,
            default_sampling=dict(model.default_sampling),
            kv_blocks=blocks,
            kv_tokens=blocks * BLOCK_TOKENS,
            kv_bytes=blocks * model.body.kv_bytes_per_block(),
            parameters=model.parameters,
            process_id=os.getpid(),
            head_timings=tuple((t.rows, t.screen, t.milliseconds) for t in built.timings),
        )

    def _make_scheduler(self) -> Scheduler:
        configuration = self.configuration
        block_bytes = self._body.kv_bytes_per_block()
        kv_bytes = configuration.kv_cache_bytes or default_kv_bytes(
            block_bytes, self.max_model_len, configuration.max_running
        )
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
            step_tokens=configuration.step_tokens,
            max_running=configuration.max_running,
        )

    def warm_up(self) -> None:
        """Compile and run every kernel once, then forget it: cache and counts are as new."""
        rounds = warm_up_requests(
            self.max_model_len,
            self.configuration.max_running,
            self.configuration.step_tokens,
            self.model.vocabulary_size,
        )
        for requests in rounds:
            run_to_completion(self, requests)
        self._scheduler.pool.drop_cache()
        self._counters = Counters()

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> SequenceEvent | None:
        """Queue a sequence; returns an error event if it can never be served."""
        try:
            self._check(request)
            state = SequenceState(request, self.model.vocabulary_size, self.model.eos_token_ids)
        except ValueError as error:
            return SequenceEvent(
                request.request_id,
                request.choice,
                (),
                finish_reason="error",
                error=str(error),
                refused=True,
            )
        self._arrivals += 1
        self._scheduler.add(Sequence(request, self._arrivals, state, state.history))
        return None

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
        if not all(0 <= token < vocabulary_size for token in request.prompt_ids):
            raise ValueError(f"a prompt token id is outside 0 to {vocabulary_size - 1}")

    def cancel(self, request_id: str) -> None:
        """End every sequence of a request now; its blocks are free for the next step."""
        for sequence in self._scheduler.sequences_of(request_id):
            self._scheduler.remove(sequence)
            self._counters.cancelled += 1

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
        return self._counters.snapshot(self._scheduler)

    def check_idle(self) -> None:
        """Raise RuntimeError if an idle engine holds blocks or has lost some."""
        self._scheduler.pool.check()
        if self._scheduler.idle and self._scheduler.pool.used:
            raise RuntimeError(f"{self._scheduler.pool.used} KV blocks leaked")

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> list[SequenceEvent]:
        """Plan, forward, head, decide, commit. Empty when there is nothing to do."""
        plan = self.plan()
        if plan is None:
            return []
        return self.finish(plan, self.forward(plan))

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None when no sequence is waiting or running."""
        return None if self._scheduler.idle else self._scheduler.plan()

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states ``[N, d]`` of the rows that score or draw (see ``build_batch``)."""
        started = time.perf_counter()
        hidden: torch.Tensor = self._body.forward(build_batch(plan)).to(self._head_device)
        self._counters.body_seconds += time.perf_counter() - started
        return hidden

    def finish(self, plan: StepPlan, hidden: torch.Tensor) -> list[SequenceEvent]:
        """Head, decisions and their consequences for the plan's sequences."""
        rows: list[int] = []
        drawing: list[Sequence] = []
        broken: dict[Sequence, Exception] = {}
        row = 0
        for chunk in plan.chunks:
            scored = scored_rows(chunk)
            if scored:
                try:
                    score_prompt(self._head, chunk, hidden[row : row + scored])
                except NonFiniteHiddenError as error:
                    broken[chunk.sequence] = error
                row += scored
            if chunk.draws:
                if chunk.sequence not in broken:
                    rows.append(row)
                    drawing.append(chunk.sequence)
                row += 1
        decisions: dict[Sequence, RowDecision] = {}
        if drawing:
            if len(rows) < hidden.shape[0]:
                hidden = hidden[rows]
            self._decide(hidden, drawing, decisions, broken)
        self._counters.steps += 1
        events = []
        for chunk in plan.chunks:
            event = self._commit(chunk, decisions, broken)
            if event is not None:
                events.append(event)
        return events

    def _decide(
        self,
        hidden: torch.Tensor,
        sequences: list[Sequence],
        decisions: dict[Sequence, RowDecision],
        broken: dict[Sequence, Exception],
    ) -> None:
        """Draw a token for every row ``hidden [N, d]``; a row that cannot harms only itself."""
        started = time.perf_counter()
        states = [sequence.state for sequence in sequences]
        try:
            thresholds = self._head.screen(hidden, [state.need() for state in states])
            candidates = self._head.rescore(thresholds)
        except NonFiniteHiddenError as error:
            for row in error.rows:
                broken[sequences[row]] = error
            sound = [row for row in range(len(sequences)) if row not in error.rows]
            if sound:
                chosen = [sequences[row] for row in sound]
                self._decide(hidden[sound], chosen, decisions, broken)
            return
        wanted = [r for r, state in enumerate(states) if state.parameters.logprobs is not None]
        normalizers = self._head.log_normalizers(candidates, wanted) if wanted else None
        self._counters.count_certificates(candidates.certificates)
        decided = time.perf_counter()
        self._counters.head_seconds += decided - started
        drawn: Sequenced[RowDecision | None]
        try:
            drawn = self._sampler.decide(candidates, states, normalizers)
        except AllTokensExcludedError as error:
            drawn = error.decisions
            for row in error.rows:
                broken[sequences[row]] = error
        for sequence, decision in zip(sequences, drawn, strict=True):
            if decision is not None:
                decisions[sequence] = decision
        self._counters.decide_seconds += time.perf_counter() - decided

    def _commit(
        self,
        chunk: Chunk,
        decisions: dict[Sequence, RowDecision],
        broken: dict[Sequence, Exception],
    ) -> SequenceEvent | None:
        """Book a chunk's tokens; what its client is told, if anything."""
        sequence = chunk.sequence
        request = sequence.request
        self._counters.prompt_tokens += max(
            0, min(chunk.start + chunk.count, sequence.prompt_length) - chunk.start
        )
        sequence.advance(chunk.count, self._scheduler.pool)
        if sequence in broken:
            return self._end(sequence, (), "error", None, error=broken[sequence])
        decision = decisions.get(sequence)
        if decision is None:
            caught_up = sequence.computed == len(sequence.token_ids)
            return self._end(sequence, (), "length", None) if caught_up else None
        token_id = decision.token_id
        sequence.state.append(token_id)
        self._counters.generated_tokens += 1
        logprobs = () if decision.logprobs is None else (decision.logprobs,)
        certificates = () if decision.certificate is None else (decision.certificate,)
        reason, stop = self._finish_reason(sequence, token_id)
        if reason is not None:
            return self._end(
                sequence, (token_id,), reason, stop, logprobs=logprobs, certificates=certificates
            )
        first = sequence.output_length == len(request.resumed_ids) + 1
        return SequenceEvent(
            request.request_id,
            request.choice,
            (token_id,),
            logprobs,
            prompt_logprobs=_scores(sequence) if first else None,
            cached_tokens=sequence.cached_tokens,
            certificates=certificates,
        )

    def _finish_reason(
        self, sequence: Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        parameters = sequence.request.parameters
        if sequence.output_length >= parameters.min_tokens:
            if token_id in parameters.stop_token_ids:
                return "stop", token_id
            if not parameters.ignore_eos and token_id in self.model.eos_token_ids:
                return "stop", None
        if sequence.output_length >= parameters.max_tokens:
            return "length", None
        return None, None

    def _end(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        stop: int | None,
        *,
        logprobs: tuple = (),
        certificates: tuple[Certificate, ...] = (),
        error: Exception | None = None,
    ) -> SequenceEvent:
        request = sequence.request
        self._counters.cached_prompt_tokens += sequence.cached_tokens
        self._counters.finished += 1
        first = sequence.output_length <= len(request.resumed_ids) + 1
        event = SequenceEvent(
            request.request_id,
            request.choice,
            token_ids,
            logprobs,
            prompt_logprobs=_scores(sequence) if first else None,
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=sequence.cached_tokens,
            error=None if error is None else str(error),
            refused=isinstance(error, AllTokensExcludedError),
            certificates=certificates,
        )
        self._scheduler.remove(sequence)
        return event


def _scores(sequence: Sequence) -> tuple | None:
    if sequence.request.parameters.prompt_logprobs is None or sequence.request.resumed_ids:
        return None
    return tuple(sequence.prompt_logprobs)


def _context_length(configuration: EngineConfiguration, model: LoadedModel) -> int:
    most = model.body.max_positions
    wanted = configuration.max_model_len
    if wanted is not None and wanted > most:
        raise ValueError(
            f"--max-model-len {wanted} is more than the {most} positions the model knows"
        )
    return wanted or most
