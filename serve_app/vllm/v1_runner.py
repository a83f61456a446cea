"""vLLM's first model runner (``v1/worker/gpu_model_runner.py``, also for CPUs), certified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from lexshard.serve_app.vllm.asked import Answer, AskedRequest, as_tensors, mask_rows, mask_words
from lexshard.serve_app.vllm.deferred import DeferredLogits, deferring, making_ready
from lexshard.serve_app.vllm.tally import TALLY

BUILT_IN = {"MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor"}


def install() -> None:
    """Makes the runner ask for deferred logits and decide them."""
    for runner in (gpu_model_runner.GPUModelRunner, CPUModelRunner):
        runner.load_model = making_ready(runner.load_model)
    runner = gpu_model_runner.GPUModelRunner
    runner.execute_model = deferring()(runner.execute_model)
    runner._sample = _decided(runner._sample)
    gpu_model_runner.apply_grammar_bitmask = _noting_masks(gpu_model_runner.apply_grammar_bitmask)


def _noting_masks(apply: Callable[..., None]) -> Callable[..., None]:
    """``apply_grammar_bitmask`` for deferred logits: the masks are kept as data."""

    @wraps(apply)
    def noting(scheduler_output: Any, grammar_output: Any, batch: Any, logits: Any) -> None:
        if not isinstance(logits, DeferredLogits):
            return apply(scheduler_output, grammar_output, batch, logits)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        ids, packed = grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
        found = mask_rows(ids, drafts, len(packed))
        # A row of logits for each guess, and one.
        rows = ((name, i) for name in batch.req_ids for i in range(1 + len(drafts.get(name, ()))))
        masks = {
            row: mask_words(packed[found[each]], logits.shape[1])
            for row, each in enumerate(rows)
            if each in found
        }
        return logits.constrain(masks, partial(apply, scheduler_output, grammar_output, batch))

    return noting


def _decided(own: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """``_sample`` for deferred logits: certified rows first, vLLM's ``own`` for what is left."""

    @wraps(own)
    def sample(runner: Any, logits: Any, metadata: Any) -> SamplerOutput:
        if not isinstance(logits, DeferredLogits):
            return own(runner, logits, metadata)
        refusal = _refusal(runner)
        if refusal is not None:
            TALLY.refuse(refusal, len(logits))
            return own(runner, logits.dense(), metadata)
        batch = runner.input_batch
        batch.update_async_output_token_ids()
        for place in list(batch.generators):
            # Not used: and vLLM takes back from it what it had for a draw that is discarded.
            if logits.decider.certifies(runner.requests[batch.req_ids[place]].sampling_params):
                del batch.generators[place]
        asked = _asked(runner, metadata)
        found = logits.decider.decide(logits, [each for _, each in asked], runner.requests)
        by_place = {place: answer for (place, _), answer in zip(asked, found, strict=True)}
        answers = [by_place.get(place) for place in range(batch.num_reqs)]
        if None in found:
            output = own(runner, logits.dense(), metadata)
        else:
            output = _blank(len(answers), metadata, batch.sampling_metadata.max_num_logprobs)
        return _with(output, answers, logits.device)

    return sample


def _refusal(runner: Any) -> str | None:
    own = runner.input_batch.logitsprocs
    every = (*own.non_argmax_invariant, *own.argmax_invariant)
    other = sorted({type(each).__name__ for each in every} - BUILT_IN)
    return f"steps with the logits processors {', '.join(other)}" if other else None


def _asked(runner: Any, metadata: Any) -> list[tuple[int, AskedRequest]]:
    """The requests that draw, with their places in the batch; those amid their prompts do not."""
    batch = runner.input_batch
    count = batch.num_reqs
    guessed, numbers = [], np.zeros(count, np.int64)
    if metadata is not None:
        guessed = metadata.draft_token_ids.tolist()
        numbers[:] = metadata.num_draft_tokens
    ends = np.cumsum(numbers)
    firsts = ends - numbers + np.arange(count)
    lasts = torch.from_numpy(runner.query_start_loc.np[1 : count + 1] - 1 - numbers)
    lengths = (runner.positions[lasts.long().to(runner.device)] + 1).tolist()
    asked = []
    for place in np.flatnonzero(~runner.discard_request_mask.np[:count]).tolist():
        own = guessed[ends[place] - numbers[place] : ends[place]]
        drafts = tuple(takewhile(lambda guess: guess >= 0, own))  # the others are padding
        name, prompt = batch.req_ids[place], int(batch.num_prompt_tokens[place])
        parameters, tokens = runner.requests[name].sampling_params, partial(_tokens, batch, place)
        where = prompt, lengths[place], int(firsts[place])
        asked.append((place, AskedRequest(name, parameters, *where, drafts, tokens)))
    return asked


def _tokens(batch: Any, place: int, first: int, last: int) -> Any:
    known = batch.is_token_ids[place, first:last]
    return np.where(known, batch.token_ids_cpu[place, first:last], -1).tolist()


def _blank(rows: int, metadata: Any, wanted: int | None) -> SamplerOutput:
    """What vLLM's sampler gives for so many requests, of which ``wanted`` log-probabilities are
    asked at most; a first token stands for those amid their prompts, which vLLM discards."""
    width = 1 if metadata is None else metadata.max_spec_len + 1
    tokens = torch.full((rows, width), -1, dtype=torch.int32)
    tokens[:, 0] = 0
    scores = None if wanted is None else LogprobsTensors.empty_cpu(rows * width, wanted + 1)
    return SamplerOutput(tokens, scores)


def _with(output: SamplerOutput, answers: list[Answer | None], device: Any) -> SamplerOutput:
    """``output`` with the ``answers`` written over it."""
    names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    scores = output.logprobs_tensors
    own = () if scores is None else [getattr(scores, name) for name in names]
    tensors = [each.cpu() for each in (output.sampled_token_ids, *own)]
    as_tensors(answers, *tensors)
    output.sampled_token_ids, *own = (each.to(device) for each in tensors)
    if scores is not None:
        output.logprobs_tensors = scores._replace(**dict(zip(names, own, strict=True)))
    return output
