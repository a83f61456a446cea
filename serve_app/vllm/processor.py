"""vLLM's layer from hidden states to logits, which leaves the logits to be computed when read."""

from __future__ import annotations

import secrets
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from lexshard.serve_app.vllm.deferred import DeferredLogits, is_deferring
from lexshard.serve_app.vllm.tally import TALLY, logger

if TYPE_CHECKING:
    from lexshard.serve_app.vllm.steps import CertifiedSteps


class CertifiedLogitsProcessor(LogitsProcessor):
    """`LogitsProcessor` for models whose head can be certified; for others it is vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        configuration = get_current_vllm_config()
        model, stages = configuration.model_config, configuration.parallel_config
        self._logprobs_mode = "raw_logprobs" if model is None else model.logprobs_mode
        refusals = {
            "models with LoRA adapters": configuration.lora_config is not None,
            "watermarks": getattr(configuration, "watermark_config", None) is not None,
            "models in several stages of a pipeline": stages.pipeline_parallel_size > 1,
            "prompts that ranks share out": stages.prefill_context_parallel_size > 1,
            "requests that ranks share out": stages.enable_batch_sharded_sampling,
            "tensor-parallel ranks that change": stages.enable_elastic_ep
            and stages.tensor_parallel_size > 1,
            "a head of another type": self.head_dtype not in (None, torch.float32, torch.bfloat16),
        }
        self._refusal = next((reason for reason, holds in refusals.items() if holds), None)
        self._steps: CertifiedSteps | None = None

    def forward(
        self,
        lm_head: Any,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> Any:
        given = lm_head, hidden_states, embedding_bias, skip_gather
        own = partial(LogitsProcessor.forward, self, *given)
        if not is_deferring() or hidden_states.ndim != 2:
            return own()
        layer: Any = getattr(self, "base_layer", self)  # LoRA's calls what it wraps with itself
        steps = layer._certified(lm_head, embedding_bias)
        if steps is None:
            TALLY.refuse(f"every step: {layer._refusal}", len(hidden_states))
            return own()
        dtype = self.head_dtype or hidden_states.dtype
        return DeferredLogits.of(steps, hidden_states, self.org_vocab_size, own, dtype)

    def _certified(self, lm_head: Any, bias: torch.Tensor | None) -> CertifiedSteps | None:
        """What decides steps, made for the weights of now; None where there is a refusal."""
        from lexshard.serve_app.vllm import head, steps  # not before: see `deferred`

        if self._steps is not None and not self._steps.head.is_current():
            logger.info("the output weights have changed: lexshard reads them again")
            self._steps = None
        if self._steps is None and self._refusal is None:
            self._refusal = head.head_refusal(self, lm_head, bias)
        if self._steps is None and self._refusal is None:
            group, is_cut = head.TensorParallelGroup(get_tp_group()), lm_head.tp_size > 1
            own = lm_head.weight, bias, self.soft_cap, self.scale, self.org_vocab_size
            seeds = Random(group.broadcast(secrets.token_bytes(32)))  # the same on every rank
            try:
                made = head.SharedHead(*own, group) if is_cut else head.PluginHead(*own)
                self._steps = steps.CertifiedSteps(made, self._logprobs_mode, seeds)
                logger.info("lexshard certifies the draws from %d tokens", self.org_vocab_size)
            except (ValueError, ImportError) as error:
                self._refusal = str(error)
        return self._steps
