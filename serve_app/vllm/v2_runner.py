"""vLLM's second model runner (``v1/worker/gpu/model_runner.py``), with draws of the certified head.

Its sampler is asked for logits after processing only where something of vLLM reads them; steps that
verify guesses are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from lexshard.serve_app.vllm.asked import AskedRequest, mask_words
from lexshard.serve_app.vllm.deferred import DeferredLogits, making_ready, with_deferred_logits
from lexshard.serve_app.vllm.tally import TALLY

BUILT_IN = {"LogitBiasState", "PenaltiesState", "BadWordsState"}


def install() -> None:
    """Makes the runner ask for deferred logits, and its sampler decide them."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker as Worker

    GPUModelRunner.sample = with_deferred_logits(GPUModelRunner.sample)
    GPUModelRunner.load_model = making_ready(GPUModelRunner.load_model)
    Sampler.add_request = _remembering(Sampler.add_request)
    Sampler.__call__ = _decided(Sampler.__call__)
    Sampler.sample = _drawn(Sampler.sample)
    RejectionSampler.__call__ = _left(RejectionSampler.__call__)
    Worker.apply_grammar_bitmask = _noting_masks(Worker.apply_grammar_bitmask)


def _remembering(add_request: Callable[..., None]) -> Callable[..., None]:
    @wraps(add_request)
    def remembering(sampler: Any, place: int, parameters: Any) -> None:
        add_request(sampler, place, parameters)
        sampler.__dict__.setdefault("lexshard_parameters", {})[place] = parameters

    return remembering


def _decided(own: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the sampler, in which `_drawn` finds the deferred logits and the batch."""

    @wraps(own)
    def call(sampler: Any, logits: Any, batch: Any) -> Any:
        if not isinstance(logits, DeferredLogits):
            return own(sampler, logits, batch)
        read = (
            sampler.compute_nans
            or sampler.return_sampling_mask
            or sampler.get_logprobs_dims(batch.idx_mapping_np) is not None
        )
        sampler.lexshard_step = logits, batch
        try:
            return own(sampler, logits.dense() if read else logits, batch)
        finally:
            sampler.lexshard_step = None

    return call


def _drawn(own: Callable[..., Any]) -> Callable[..., Any]:
    """``sample``: the tokens [N] of certified rows, vLLM's ``own`` of what is left."""

    @wraps(own)
    def sample(sampler: Any, logits: torch.Tensor, *rest: Any, **named: Any) -> Any:
        step = getattr(sampler, "lexshard_step", None)
        if step is None:
            return own(sampler, logits, *rest, **named)
        deferred, batch = step
        other = {type(each).__name__ for each in sampler.logits_processors} - BUILT_IN
        if other or sampler.logprobs_mode != "raw_logprobs" or sampler.return_sampling_mask:
            reason = f"the logits processors {', '.join(sorted(other))}" if other else "processed"
            TALLY.refuse(f"steps that want logits: {reason}", len(deferred))
            return own(sampler, deferred.dense(), *rest, **named)
        asked = _asked(sampler, batch)
        states = sampler.req_states.req_id_to_index
        found = deferred.decider.decide(deferred, [each for _, each in asked], states)
        if None in found:
            tokens, processed = own(sampler, deferred.dense(), *rest, **named)
        else:
            processed = logits
            tokens = torch.zeros(len(deferred), dtype=torch.int64, device=deferred.device)
        rows = [row for (row, _), answer in zip(asked, found, strict=True) if answer is not None]
        ids = [answer[0].token_id for answer in found if answer is not None]
        tokens[rows] = torch.tensor(ids, dtype=tokens.dtype, device=tokens.device)
        return tokens, processed

    return sample


def _asked(sampler: Any, batch: Any) -> list[tuple[int, AskedRequest]]:
    """The requests that draw, with their rows; those amid their prompts do not."""
    lengths = (batch.positions[batch.logits_indices] + 1).tolist()
    states, asked = sampler.req_states, []
    for row, place in enumerate(batch.idx_mapping_np.tolist()):
        if lengths[row] < states.prefill_len.np[place]:
            continue
        parameters = sampler.lexshard_parameters[place]
        prompt = int(states.prompt_len.np[place])
        tokens = partial(_tokens, states, place)
        request = AskedRequest(
            batch.req_ids[row], parameters, prompt, lengths[row], row, (), tokens
        )
        asked.append((row, request))
    return asked


def _tokens(states: Any, place: int, first: int, last: int) -> list[int]:
    tokens: list[int] = states.all_token_ids.gpu[place, first:last].tolist()
    return tokens


def _left(own: Callable[..., Any]) -> Callable[..., Any]:
    """The verification of guesses by vLLM's ``own``."""

    @wraps(own)
    def call(sampler: Any, logits: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(logits, DeferredLogits):
            TALLY.refuse("guesses in vLLM's second model runner", len(logits))
            logits = logits.dense()
        return own(sampler, logits, *rest, **named)

    return call


def _noting_masks(apply: Callable[..., None]) -> Callable[..., None]:
    @wraps(apply)
    def noting(worker: Any, logits: Any, batch: Any, names: list[str], packed: Any) -> None:
        if not isinstance(logits, DeferredLogits):
            apply(worker, logits, batch, names, packed)
            return
        masks = {}
        if not batch.num_draft_tokens:  # else vLLM decides
            for name, words in zip(names, packed, strict=True):
                masks[batch.req_ids.index(name)] = mask_words(words, logits.shape[1])
        logits.constrain(masks, lambda dense: apply(worker, dense, batch, names, packed))

    return noting
