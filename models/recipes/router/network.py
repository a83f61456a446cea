"""How the router's network learns which cluster comes next."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

BATCH = 1024  # positions
RATE = 3e-3  # of Adam; falls to zero in a straight line
DECAY = 1e-4

Floats = npt.NDArray[np.float32]


class Network(NamedTuple):
    """``outer silu(inner [embedding ; hidden before] + inner_bias) + outer_bias``."""

    inner: Floats  # [h, 2 d]
    inner_bias: Floats  # [h]
    outer: Floats  # [M, h]
    outer_bias: Floats  # [M]


def fit_network(
    embedded: Floats,
    before: Floats,
    wanted: npt.NDArray[np.float16],
    *,
    width: int,
    epochs: int,
    seed: int,
    progress: Callable[[float], None] = lambda share: None,
) -> tuple[Network, tuple[float, ...]]:
    """A network of ``width`` hidden units that ranks clusters, and its mean loss in every epoch.

    ``embedded`` and ``before`` [N, d]; ``wanted`` [N, M] says how much each cluster is worth at a
    position, and its sum how much the position counts. The loss is the cross-entropy of the
    scores' softmax against it. The result depends on the arguments alone.
    """
    inputs = torch.from_numpy(np.concatenate([embedded, before], axis=1))
    labels = torch.from_numpy(wanted)
    mean, deviation = inputs.mean(dim=0), inputs.std(dim=0, correction=0) + 1e-6
    random = torch.Generator().manual_seed(seed)
    inner = _initial(width, inputs.shape[1], random)
    outer = _initial(labels.shape[1], width, random)
    weights = [
        *(inner, torch.zeros(width, requires_grad=True)),
        *(outer, torch.zeros(labels.shape[1], requires_grad=True)),
    ]
    optimiser = torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY)
    per_epoch = math.ceil(len(inputs) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: 1.0 - step / (epochs * per_epoch)
    )
    losses = []
    for _ in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(inputs), generator=random).split(BATCH):
            rows = (inputs[chosen] - mean) / deviation
            middle = functional.silu(functional.linear(rows, weights[0], weights[1]))
            scores = functional.linear(middle, weights[2], weights[3])
            loss = -(labels[chosen].float() * functional.log_softmax(scores, dim=1)).sum()
            optimiser.zero_grad()
            (loss / len(chosen)).backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach())
            progress(1.0 / (epochs * per_epoch))
        losses.append(total / len(inputs))
    with torch.no_grad():
        scaled = weights[0] / deviation  # what the inputs went through becomes part of the weights
        bias = weights[1] - scaled @ mean
        arrays = (scaled, bias, weights[2], weights[3])
        return Network(*(each.detach().numpy() for each in arrays)), tuple(losses)


def _initial(outputs: int, inputs: int, random: torch.Generator) -> torch.Tensor:
    weight = torch.randn(outputs, inputs, generator=random) / math.sqrt(inputs)
    return weight.requires_grad_()
