"""vLLM's first model runner (``v1/worker/gpu_model_runner.py``, also for CPUs), with steps that are
decided by the certified head."""

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

from lexshard.serve_app.vllm.asked import Answer, AskedRequest, as_tensors, mask_words
from lexshard.serve_app.vllm.deferred import DeferredLogits, making_ready, with_deferred_logits
from lexshard.serve_app.vllm.tally import TALLY

BUILT_IN = {"MinPLogitsProcessor", "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor"}


def install() -> None:
    """Makes the runner ask for deferred logits and decide them."""
    for runner in (gpu_model_runner.GPUModelRunner, CPUModelRunner):
        runner.load_model = making_ready(runner.load_model)
    runner = gpu_model_runner.GPUModelRunner
    runner.execute_model = with_deferred_logits(runner.execute_model)
    runner._sample = _decided(runner._sample)
    gpu_model_runner.apply_grammar_bitmask = _noting_masks(gpu_model_runner.apply_grammar_bitmask)


def _noting_masks(apply: Callable[..., None]) -> Callable[..., None]:
    """``apply_grammar_bitmask`` for deferred logits: the masks are kept as data."""

    @wraps(apply)
    def noting(scheduler_output: Any, grammar_output: Any, batch: Any, logits: Any) -> None:
        if not isinstance(logits, DeferredLogits):
            apply(scheduler_output, grammar_output, batch, logits)
            return
        drafts = scheduler_output.scheduled_spec_decode_tokens
        firsts, row = {}, 0
        for request_id in batch.req_ids:
            firsts[request_id] = row
            row += 1 + len(drafts.get(request_id, ()))
        masks, place = {}, 0
        for request_id in grammar_output.structured_output_request_ids:
            count = 1 + len(drafts.get(request_id, ()))
            if request_id in firsts:
                for each in range(count):
                    packed = grammar_output.grammar_bitmask[place + each]
                    masks[firsts[request_id] + each] = mask_words(packed, logits.shape[1])
            place += count
        logits.constrain(masks, partial(apply, scheduler_output, grammar_output, batch))

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
        answers: list[Answer | None] = [None] * batch.num_reqs
        for (place, _), answer in zip(asked, found, strict=True):
            answers[place] = answer
        theirs = own(runner, logits.dense(), metadata) if None in found else None
        return _output(runner, answers, metadata, theirs, logits.device)

    return sample


def _refusal(runner: Any) -> str | None:
    processors = runner.input_batch.logitsprocs
    for each in (*processors.non_argmax_invariant, *processors.argmax_invariant):
        if type(each).__name__ not in BUILT_IN:
            return f"steps with the logits processor {type(each).__name__}"
    return None


def _asked(runner: Any, metadata: Any) -> list[tuple[int, AskedRequest]]:
    """The requests that draw, with their places in the batch; those amid their prompts do not."""
    batch = runner.input_batch
    count = batch.num_reqs
    numbers = np.zeros(count, np.int64)
    guessed: list[int] = []
    if metadata is None:
        lasts = torch.from_numpy(runner.query_start_loc.np[1 : count + 1] - 1).long()
    else:
        numbers[:] = metadata.num_draft_tokens
        guessed = metadata.draft_token_ids.tolist()
    ends = np.cumsum(numbers)
    firsts = ends - numbers + np.arange(count)
    if metadata is not None:
        lasts = metadata.logits_indices[torch.from_numpy(firsts).to(runner.device)]
    lengths = (runner.positions[lasts] + 1).tolist()
    asked = []
    for place in np.flatnonzero(~runner.discard_request_mask.np[:count]).tolist():
        own = guessed[ends[place] - numbers[place] : ends[place]]
        name = batch.req_ids[place]
        request = AskedRequest(
            name,
            runner.requests[name].sampling_params,
            int(batch.num_prompt_tokens[place]),
            lengths[place],
            int(firsts[place]),
            tuple(takewhile(lambda guess: guess >= 0, own)),  # the others are padding
            partial(_tokens, batch, place),
        )
        asked.append((place, request))
    return asked


def _tokens(batch: Any, place: int, first: int, last: int) -> list[int]:
    known = batch.is_token_ids[place, first:last]
    tokens: list[int] = np.where(known, batch.token_ids_cpu[place, first:last], -1).tolist()
    return tokens


def _output(
    runner: Any,
    answers: list[Answer | None],
    metadata: Any,
    theirs: SamplerOutput | None,
    device: torch.device,
) -> SamplerOutput:
    """``answers`` as vLLM's sampler gives them, in ``theirs`` where it drew for some requests."""
    wanted = runner.input_batch.sampling_metadata.max_num_logprobs
    if theirs is not None:
        tokens, scores = theirs.sampled_token_ids.cpu(), theirs.logprobs_tensors
        kept = None if scores is None else tuple(each.cpu() for each in scores[:3])
    else:
        width = 1 if metadata is None else metadata.max_spec_len + 1
        tokens = torch.full((len(answers), width), -1, dtype=torch.int32)
        tokens[:, 0] = 0  # of requests amid their prompts, which vLLM discards
        rows = tokens.numel()
        kept = None
        if wanted is not None:
            kept = (
                torch.zeros((rows, wanted + 1), dtype=torch.int32),
                torch.zeros((rows, wanted + 1)),
                torch.zeros(rows, dtype=torch.int64),
            )
    as_tensors(answers, tokens, kept)
    return SamplerOutput(
        sampled_token_ids=tokens.to(device),
        logprobs_tensors=None
        if kept is None
        else LogprobsTensors(*(each.to(device) for each in kept)),
    )
