"""The output head of a model: its weights and what the model does to its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lexshard.actors.body.errors import SelfTestError, UnsupportedModelError
from lexshard.kernels.linear import fits_bfloat16, row_slices


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """``logits = softcap * tanh((hidden @ weight.T + bias) * scale / softcap)``.

    ``weight [V, d]`` is bfloat16 where every value is exactly one (the same logits from half the
    bytes), else float32; ``softcap`` None means none.
    """

    weight: torch.Tensor  # [V, d]
    bias: torch.Tensor | None  # [V] float32
    softcap: float | None
    scale: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """All logits of ``hidden [N, d]`` in float32 the plain way, for checks."""
        rows = hidden.float()
        logits = torch.cat([rows @ part.float().T for part in row_slices(self.weight)], dim=1)
        if self.bias is not None:
            logits = logits + self.bias
        logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` in bfloat16 where that is exact, else in float32; contiguous."""
    return (weight.bfloat16() if fits_bfloat16(weight) else weight.float()).contiguous()


def read_head(model: Any) -> HeadWeights:
    """The head of a transformers model, with scale and soft-cap from its configuration."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} names no output embeddings: choose a model of another family"
        )
    config = model.config.get_text_config(decoder=True)
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    bias = getattr(layer, "bias", None)
    return HeadWeights(
        weight=narrowed(layer.weight.detach()),
        bias=None if bias is None else bias.detach().float(),
        softcap=None if softcap is None else float(softcap),
        scale=scale,
    )


def check_head(
    head: HeadWeights, hidden: torch.Tensor, logits: torch.Tensor, tolerance: float
) -> None:
    """``logits [N, V]`` are the model's own for ``hidden [N, d]``; ours must be the same.

    ``tolerance`` is relative to the largest logit. Raises SelfTestError naming what differs.
    """
    ours, theirs = head.logits(hidden).double(), logits.double()
    size = float(theirs.abs().max())
    difference = float((ours - theirs).abs().max())
    if difference <= tolerance * max(size, 1e-6):
        return
    raise SelfTestError(
        f"the output head gives logits that differ from the model's by up to {difference:.3g} "
        f"(largest logit {size:.3g}): {_diagnosis(ours, theirs, tolerance)}. This family needs "
        "support in actors/body/head_weights.py"
    )


def _diagnosis(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> str:
    limit = 10 * tolerance * float(theirs.abs().max())
    ratio = float((ours * theirs).sum() / (ours * ours).sum())
    if float((ratio * ours - theirs).abs().max()) <= limit:
        return f"the model multiplies its logits by {ratio:.6g} more (a logit scale)"
    gap = theirs - ours
    if float((gap - gap.mean(dim=0)).abs().max()) <= limit:
        return "the model adds a bias to its logits"
    order = ours.flatten().argsort()
    if bool((theirs.flatten()[order].diff() >= -limit).all()):
        return "the model bends its logits by a monotone function (a soft-cap)"
    return (
        "the model computes its logits from other weights (is the head tied?) or through more "
        "layers than one"
    )
