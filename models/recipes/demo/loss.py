"""Linear layer and softmax losses fused in cache-sized chunks.

Logits exist for one chunk of rows at a time and are turned into their own gradient in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 256


def _softmax_in_place(logits: Tensor) -> Tensor:
    """Replace logits by probabilities; return the log of the normaliser of each row."""
    peak = logits.amax(dim=1, keepdim=True)
    logits.sub_(peak).exp_()
    total = logits.sum(dim=1, keepdim=True)
    logits.div_(total)
    return (total.log_() + peak).squeeze(1)


class _FusedLoss(torch.autograd.Function):
    """``wanted`` are target ids [rows], or the teacher's hidden states and output rows."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Tensor | tuple[Tensor, Tensor],
    ) -> Tensor:
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight)
        loss = hidden.new_zeros(())
        for begin in range(0, hidden.shape[0], CHUNK_ROWS):
            chunk = slice(begin, begin + CHUNK_ROWS)
            rows = hidden[chunk]
            logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
            if isinstance(wanted, Tensor):
                targets = wanted[chunk, None]
                expected = logits.gather(1, targets).squeeze(1)
                loss += (_softmax_in_place(logits) - expected).sum()
                logits.scatter_add_(1, targets, logits.new_full(targets.shape, -1.0))
            else:
                taught = wanted[0][chunk] @ wanted[1].t()
                if bias is not None:
                    taught.add_(bias)
                _softmax_in_place(taught)
                expected = torch.einsum("rv,rv->r", taught, logits)
                loss += (_softmax_in_place(logits) - expected).sum()
                logits.sub_(taught)
            torch.mm(logits, weight, out=hidden_gradient[chunk])
            weight_gradient.addmm_(logits.t(), rows)
        context.save_for_backward(hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = context.saved_tensors
        return hidden_gradient * gradients[0], weight_gradient * gradients[0], None, None


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Summed cross entropy of ``softmax(hidden @ weight.T + bias)`` at the targets."""
    return _FusedLoss.apply(hidden, weight, bias, targets)


def fused_distillation(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Summed cross entropy of ``softmax(hidden @ weight.T + bias)`` against the teacher's."""
    return _FusedLoss.apply(hidden, weight, bias, (teacher_hidden, teacher_weight))
