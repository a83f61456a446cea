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

import torch

from actors.body.loading import LoadedModel, load
from actors.completion import Completion, run_to_completion
from actors.configuration import EngineConfiguration, EngineInformation
from actors.kv_cache import BLOCK_TOKENS, BlockPool
from actors.memory import default_kv_bytes
from actors.messages import (
    EngineStatistics,
    FinishReason,
    Request,
    RowDecision,
    SamplingParameters,
    SequenceEvent,
)
from actors.sampler import Sampler, SequenceState
from actors.scheduler import Chunk, Scheduler, StepPlan
from actors.scoring import PromptScorer
from actors.sequence import Sequence
from actors.shard import Shard
from actors.step_batch import build_batch, scored_rows
from actors.warm_up import warm_up


class Engine:
    """Serves sequences step by step. Not thread-safe: one thread plans, finishes and submits.

    Raises what ``actors.body.loading.load`` raises (``ModelRefusedError``) and ValueError for
    settings that cannot work together.
    """

    def __init__(self, configuration: EngineConfiguration) -> None:
        threads = configuration.threads or os.cpu_count() or 1
        torch.set_num_threads(threads)
        model = load(
            configuration.model,
            configuration.dtype,
            body=configuration.body,
            fast_prefill=configuration.fast_prefill,
        )
        self.configuration = configuration
        self.model = model
        self._body = model.body
        self.max_model_len = _context_length(configuration, model)
        block_bytes = model.body.kv_bytes_per_block()
        kv_bytes = configuration.kv_cache_bytes or default_kv_bytes(
            block_bytes, self.max_model_len, configuration.max_running
        )
        blocks = kv_bytes // block_bytes
        if blocks * BLOCK_TOKENS < self.max_model_len:
            raise ValueError(
                f"{kv_bytes} bytes of KV cache hold {blocks * BLOCK_TOKENS} tokens, fewer than one "
                f"sequence of {self.max_model_len}: raise --kv-cache-memory to at least "
                f"{-(-self.max_model_len // BLOCK_TOKENS) * block_bytes} bytes or lower "
                "--max-model-len"
            )
        model.body.allocate_cache(blocks)
        self._pool = BlockPool(blocks, prefix_cache=configuration.prefix_cache)
        self._scheduler = Scheduler(
            self._pool,
            step_tokens=configuration.step_tokens,
            max_running=configuration.max_running,
        )
        self._shard = Shard(
            model.head.weight,
            model.head.bias,
            softcap=model.head.softcap,
            scale=model.head.scale,
            vocabulary_size=model.vocabulary_size,
        )
        self._sampler = Sampler()
        self._scorer = PromptScorer(self._shard)
        self._arrivals = 0
        self._counts = EngineStatistics()
        self.information = EngineInformation(
            model=configuration.model,
            dtype=model.dtype,
            device=str(model.body.device),
            body=model.body.name,
            head="dense",
            batch_invariant=model.body.batch_invariant,
            threads=threads,
            max_model_len=self.max_model_len,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=model.eos_token_ids,
            default_sampling=dict(model.default_sampling),
            kv_blocks=blocks,
            kv_tokens=blocks * BLOCK_TOKENS,
            kv_bytes=blocks * block_bytes,
            parameters=model.parameters,
            process_id=os.getpid(),
        )

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> SequenceEvent | None:
        """Queue a sequence; returns an error event if it can never be served."""
        refusal = self._refusal(request)
        if refusal is not None:
            return SequenceEvent(
                request.request_id, request.choice, (), finish_reason="error", error=refusal
            )
        self._arrivals += 1
        state = SequenceState(request, self.model.eos_token_ids)
        token_ids = [*request.prompt_ids, *request.resumed_ids]
        self._scheduler.add(Sequence(request, self._arrivals, state, token_ids))
        return None

    def _refusal(self, request: Request) -> str | None:
        length, wanted = len(request.prompt_ids), request.parameters.max_tokens
        if length == 0:
            return "the prompt is empty"
        if length + wanted > self.max_model_len:
            return (
                f"{length} prompt tokens and {wanted} to generate exceed the context of "
                f"{self.max_model_len} tokens"
            )
        if not all(0 <= token < self._body.vocabulary_size for token in request.prompt_ids):
            return f"a prompt token id is outside 0 to {self._body.vocabulary_size - 1}"
        return None

    def cancel(self, request_id: str) -> None:
        """End every sequence of a request now; its blocks are free for the next step."""
        for sequence in self._scheduler.sequences_of(request_id):
            self._scheduler.remove(sequence)
            self._counts.cancelled += 1

    # -- one step ---------------------------------------------------------------------------------

    def step(self) -> list[SequenceEvent]:
        """Plan, forward, head, decide, commit. Empty when there is nothing to do."""
        plan = self.plan()
        if plan is None:
            return []
        return self.finish(plan, self.forward(plan))

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None when no sequence is waiting or running."""
        if self._scheduler.idle:
            return None
        return self._scheduler.plan()

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states ``[N, d]`` of the rows that draw or score (see ``build_batch``)."""
        started = time.perf_counter()
        hidden = self._body.forward(build_batch(plan))
        self._counts.body_seconds += time.perf_counter() - started
        return hidden

    def finish(self, plan: StepPlan, hidden: torch.Tensor) -> list[SequenceEvent]:
        """Head, decisions and their consequences for the plan's sequences."""
        draw_rows: list[int] = []
        drawing: list[Chunk] = []
        row = 0
        for chunk in plan.chunks:
            scored = scored_rows(chunk)
            if scored:
                self._scorer.score(chunk, hidden[row : row + scored])
            row += scored
            if chunk.draws:
                shares_row = scored == chunk.count
                draw_rows.append(row - 1 if shares_row else row)
                row += not shares_row
                drawing.append(chunk)
        decisions = self._decide(hidden[draw_rows], drawing) if drawing else []
        return self._commit(plan, dict(zip(map(id, drawing), decisions, strict=True)))
