"""The certified head of a model that vLLM has loaded, or why there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite.binding import ffi

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.sampler import token_logprobs
from lexshard.actors.messages import RowDecision
from lexshard.actors.standalone.drawing_head import DrawingHead
from lexshard.actors.states.row_table import RowNames

_named = type(ffi.lib).__getattr__


def _without_dict(library: Any, name: str) -> Any:
    """A compiler's library answers to every name, to ``__dict__`` with what is none: vLLM for CPUs
    looks into all that is loaded when it makes another engine in this process."""
    if name == "__dict__":
        raise AttributeError(name)
    return _named(library, name)


type(ffi.lib).__getattr__ = _without_dict

UNQUANTISED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")


def head_refusal(processor: Any, lm_head: Any, bias: torch.Tensor | None) -> str | None:
    """Why the logits that vLLM's ``processor`` makes with ``lm_head`` cannot be certified; None if
    they can."""
    weight, rows = getattr(lm_head, "weight", None), processor.org_vocab_size
    method = type(getattr(lm_head, "quant_method", None)).__name__
    refusals = {
        "a model that computes its logits itself": processor.logits_as_input,
        "added vocabulary that is cut across tensor-parallel ranks": lm_head.tp_size > 1
        and lm_head.num_added_embeddings > 0,
        f"an output head with {method}": method not in UNQUANTISED,
        "both a soft cap and a scale": processor.soft_cap is not None and processor.scale != 1.0,
        f"a logit scale of {processor.scale}": processor.scale <= 0,
        "output weights of another type than float32 and bfloat16": weight is None
        or weight.dtype not in (torch.float32, torch.bfloat16),
        "fewer output rows than tokens": weight is not None
        and lm_head.tp_size * min(len(weight), rows if bias is None else len(bias)) < rows,
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


class PluginHead(DrawingHead):
    """With log-probabilities as vLLM gives them: those within the mask of the row."""

    def _decided(self, names: RowNames, found: Candidates) -> list[RowDecision | None]:
        decided = super()._decided(names, found)
        for row, mask in enumerate(names.masks):
            scored = decided[row]
            if mask is not None and scored is not None and scored.logprobs is not None:
                raw = np.full((1, self.vocabulary_size), -np.inf, np.float32)
                raw[0, mask.ids] = found.raw[found.offsets[row] :][mask.ids]
                token, count = np.array([scored.token_id]), len(scored.logprobs.top)
                decided[row] = RowDecision(scored.token_id, *token_logprobs(raw, token, [count]))
        return decided
