"""``transformers`` ``generate``: the requests as one left-padded batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from lexshard.loadtest.bench.engine_runs import EngineRun
from lexshard.loadtest.bench.synthetic.jobs import Job


class GenerateRunner:
    """A warm model with SDPA attention and KV cache, greedy, that never stops early.

    The batch generates as many tokens as its longest request wants, as ``generate`` must; only
    the tokens each request wanted count. The end-of-sequence ids are taken off the generation
    configuration, which costs ``generate`` nothing per step. Its tokens are timed as it streams
    them. With ``draft`` it is assisted by that model; then it takes one request at a time, and runs
    several one after the other.
    """

    def __init__(self, model: str, dtype: str, threads: int, draft: str | None = None) -> None:
        self.name = "generate" if draft is None else "assisted generate"
        torch.set_num_threads(threads)
        self._draft: Any = None
        if draft is not None:
            self._draft = AutoModelForCausalLM.from_pretrained(
                draft,
                dtype=getattr(torch, dtype),
                attn_implementation="sdpa",
                local_files_only=True,
            ).eval()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()
        settings = self._model.generation_config
        settings.do_sample = False
        settings.temperature = settings.top_k = settings.top_p = None
        settings.eos_token_id = None
        settings.pad_token_id = 0

    def run(self, jobs: Sequence[Job]) -> EngineRun:
        if self._draft is None:
            return self._run_batch(jobs)
        started = time.perf_counter()
        runs = [(time.perf_counter() - started, self._run_batch([job])) for job in jobs]
        return EngineRun(
            wall_seconds=time.perf_counter() - started,
            token_ids=tuple(each.token_ids[0] for _, each in runs),
            token_seconds=tuple(
                tuple(begin + moment for moment in each.token_seconds[0]) for begin, each in runs
            ),
        )

    def _run_batch(self, jobs: Sequence[Job]) -> EngineRun:
        input_ids, attention_mask = left_padded([job.prompt_ids for job in jobs])
        watch = _Stopwatch()
        started = time.perf_counter()
        self._model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max(job.output_tokens for job in jobs),
            use_cache=True,
            streamer=watch,
            **({} if self._draft is None else {"assistant_model": self._draft}),
        )
        wall = time.perf_counter() - started
        seconds = [
            moment - started
            for moment, tokens in zip(watch.moments, watch.tokens, strict=True)
            for _ in range(tokens.shape[1])
        ]
        columns = torch.cat(watch.tokens, dim=1).tolist()  # [B, most]
        return EngineRun(
            wall_seconds=wall,
            token_ids=tuple(
                tuple(row[: job.output_tokens]) for row, job in zip(columns, jobs, strict=True)
            ),
            token_seconds=tuple(tuple(seconds[: job.output_tokens]) for job in jobs),
        )


class _Stopwatch(BaseStreamer):
    """Notes every step's tokens and when they came (the first call carries the prompts)."""

    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []
        self.moments: list[float] = []
        self._prompts_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompts_seen:
            self.moments.append(time.perf_counter())
            self.tokens.append(
                value.reshape(value.shape[0], -1) if value.ndim else value[None, None]
            )
        self._prompts_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as ``input_ids`` and ``attention_mask``, both ``[B, longest]``."""
    longest = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    return input_ids, attention_mask
