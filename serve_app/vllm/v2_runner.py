"""vLLM's second model runner (``v1/worker/gpu/model_runner.py``), with draws of the certified head.

Batches with guesses and those whose logits something of vLLM reads are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import torch

from lexshard.serve_app.vllm.asked import AskedRequest, mask_rows, mask_words
from lexshard.serve_app.vllm.deferred import DeferredLogits, deferring, making_ready
from lexshard.serve_app.vllm.tally import TALLY

BUILT_IN = {"LogitBiasState", "PenaltiesState", "BadWordsState"}


def install() -> None:
    """Makes the runner ask for deferred logits, and its sampler decide them."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker as Worker

    GPUModelRunner.sample = _with_deferred_logits(GPUModelRunner.sample)
    GPUModelRunner.load_model = making_ready(GPUModelRunner.load_model)
    Sampler.add_request = _remembering(Sampler.add_request)
    Sampler.sample = drawn_by_head(Sampler.sample)
    Worker.apply_grammar_bitmask = _noting_masks(Worker.apply_grammar_bitmask)


def batch_refusal(sampler: Any, batch: Any) -> str | None:
    """Why vLLM must compute the logits of a batch; None if it need not."""
    kind = type(sampler).__name__
    if kind != "Sampler":  # one for a watermark inherits what is wrapped, and draws otherwise
        return f"batches with the sampler {kind} in vLLM's second model runner"
    scored = sampler.get_logprobs_dims(batch.idx_mapping_np) is not None
    refusals = {
        # Those that are not verified now, after all, have masks, too.
        "guesses": batch.num_draft_tokens or np.any(batch.num_draft_tokens_per_req),
        "log-probabilities": scored,
        "other logits processors": {type(each).__name__ for each in sampler.logits_processors}
        - BUILT_IN,
        "checks of logits": sampler.compute_nans or sampler.return_sampling_mask,
    }
    found = next((reason for reason, holds in refusals.items() if holds), None)
    return found and f"batches with {found} in vLLM's second model runner"


def _with_deferred_logits(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def sample(runner: Any, hidden: torch.Tensor, batch: Any, grammar: Any) -> Any:
        refusal = batch_refusal(runner.sampler, batch)
        if refusal is not None:
            TALLY.refuse(refusal, len(batch.logits_indices))
            return own(runner, hidden, batch, grammar)
        with deferring():
            return own(runner, hidden, batch, grammar)

    return sample


def _remembering(add_request: Callable[..., None]) -> Callable[..., None]:
    @wraps(add_request)
    def remembering(sampler: Any, place: int, parameters: Any) -> None:
        add_request(sampler, place, parameters)
        sampler.__dict__.setdefault("lexshard_parameters", {})[place] = parameters

    return remembering


def drawn_by_head(own: Callable[..., Any]) -> Callable[..., Any]:
    """``sample``: the tokens [N] of certified rows, vLLM's ``own`` of what is left."""

    @wraps(own)
    def sample(sampler: Any, logits: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(logits, DeferredLogits):
            return own(sampler, logits, *rest, **named)
        states, asked = sampler.req_states, []
        for row, (place, before) in enumerate(zip(rest[2].tolist(), rest[3].tolist(), strict=True)):
            if before + 1 < states.prefill_len.np[place]:
                continue  # amid its prompt
            name, parameters = states.index_to_req_id[place], sampler.lexshard_parameters[place]
            prompt, tokens = int(states.prompt_len.np[place]), partial(_tokens, states, place)
            asked.append(AskedRequest(name, parameters, prompt, before + 1, row, (), tokens))
        found = logits.decider.decide(logits, asked, states.req_id_to_index)
        drawn = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        processed = logits
        if None in found:
            drawn, processed = own(sampler, logits.dense(), *rest, **named)
        for each, answer in zip(asked, found, strict=True):
            if answer is not None:
                drawn[each.first] = answer[0].token_id
        return drawn, processed

    return sample


def _tokens(states: Any, place: int, first: int, last: int) -> Any:
    return states.all_token_ids.gpu[place, first:last].tolist()


def _noting_masks(apply: Callable[..., None]) -> Callable[..., None]:
    @wraps(apply)
    def noting(worker: Any, logits: Any, batch: Any, names: list[str], packed: Any) -> None:
        if not isinstance(logits, DeferredLogits):
            return apply(worker, logits, batch, names, packed)
        masks = {
            batch.req_ids.index(name): mask_words(packed[row], logits.shape[1])
            for (name, _), row in mask_rows(names, {}, len(packed)).items()
        }
        return logits.constrain(masks, lambda dense: apply(worker, dense, batch, names, packed))

    return noting
