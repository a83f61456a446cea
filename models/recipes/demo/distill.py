"""What the draft takes from the target: its embedding to begin with and its predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from models.recipes.demo.candidates import SoftmaxCandidates
from models.recipes.demo.export import TEMPERATURE
from models.recipes.demo.loss import fused_distillation
from models.recipes.demo.network import EMBEDDING, NetworkWeights, hidden_states, rotary_table
from models.recipes.demo.recipe import NetworkShape
from models.recipes.demo.trainer import LossFunction


def projected_embedding(embedding: Tensor, width: int, common: Tensor) -> Tensor:
    """The target's embedding on the ``width`` main directions of its ``common`` rows."""
    rows = embedding[common].double()
    _, directions = torch.linalg.eigh(rows.t() @ rows)
    return (embedding.double() @ directions[:, -width:]).float()


def distillation_loss(target: NetworkWeights, shape: NetworkShape) -> LossFunction:
    """Cross entropy between the softmaxes of target and draft, both at ``TEMPERATURE``.

    Guesses are drawn with the target's noise at the temperature of a request: what counts is how
    near the two distributions are there, not only which token each of them likes best.
    """
    cosine, sine = rotary_table(shape, shape.positions)

    def loss(
        hidden: Tensor,
        head: Tensor,
        inputs: Tensor,
        targets: Tensor,
        candidates: SoftmaxCandidates | None,
    ) -> Tensor:
        length = inputs.shape[1]
        with torch.no_grad():
            taught = hidden_states(target, shape, inputs, (cosine[:length], sine[:length]))
            embedding = target[EMBEDDING]
            if candidates is None:
                taught_head, bias = embedding, None
            else:
                taught_head, bias = embedding[candidates.identities], candidates.bias
        return fused_distillation(
            hidden / TEMPERATURE, head, taught / TEMPERATURE, taught_head, bias
        )

    return loss
