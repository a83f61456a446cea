"""What the draft takes from the target: its embedding to begin with and its predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_app.demo.candidates import SoftmaxCandidates
from serve_app.demo.loss import fused_distillation
from serve_app.demo.network import EMBEDDING, NetworkWeights, hidden_states, rotary_table
from serve_app.demo.recipe import NetworkShape
from serve_app.demo.train import LossFunction

HARD_SHARE = 0.5


def projected_embedding(embedding: Tensor, width: int, common: Tensor) -> Tensor:
    """The target's embedding on the ``width`` main directions of its ``common`` rows."""
    rows = embedding[common].double()
    _, directions = torch.linalg.eigh(rows.t() @ rows)
    return (embedding.double() @ directions[:, -width:]).float()


def distillation_loss(target: NetworkWeights, shape: NetworkShape) -> LossFunction:
    """Cross entropy against the target's softmax blended with the target's best token."""
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
        return fused_distillation(hidden, head, taught, taught_head, HARD_SHARE, bias)

    return loss
