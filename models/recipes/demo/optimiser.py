"""Muon for the body matrices, Adam for embeddings and norms."""

from __future__ import annotations

from concurrent.futures import Executor

import torch
from torch import Tensor

from models.recipes.demo.network import EMBEDDING, NetworkWeights
from models.recipes.demo.recipe import Schedule

_ITERATION = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_ADAM_BETAS = (0.9, 0.95)
_ADAM_EPSILON = 1e-10


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, by the quintic Newton-Schulz iteration of Muon."""
    wide = matrix.shape[0] <= matrix.shape[1]
    value = matrix if wide else matrix.t()
    value = value / (value.norm() + 1e-7)
    first, second, third = _ITERATION
    for _ in range(_ITERATIONS):
        gram = value @ value.t()
        mixed = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        value = torch.addmm(value, mixed, value, beta=first)
    return value if wide else value.t()


class Optimiser:
    """Updates weights in place from a dictionary of gradients."""

    def __init__(self, weights: NetworkWeights, schedule: Schedule) -> None:
        self._weights = weights
        self._schedule = schedule
        self._moments = {name: torch.zeros_like(value) for name, value in weights.items()}
        self._squares = {
            name: torch.zeros_like(value)
            for name, value in weights.items()
            if not self._is_muon(name, value)
        }

    @staticmethod
    def _is_muon(name: str, value: Tensor) -> bool:
        return value.dim() == 2 and name != EMBEDDING

    def _muon(self, name: str, gradient: Tensor, factor: float) -> None:
        weight, moment = self._weights[name], self._moments[name]
        momentum = self._schedule.muon_momentum
        moment.lerp_(gradient, 1.0 - momentum)
        direction = orthogonalise(gradient.lerp(moment, momentum))
        rate = self._schedule.muon_rate * factor
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight.mul_(1.0 - rate * self._schedule.muon_decay)
        weight.add_(direction, alpha=-rate * scale)

    def _adam(self, name: str, gradient: Tensor, factor: float, step: int) -> None:
        weight, moment, square = self._weights[name], self._moments[name], self._squares[name]
        first, second = _ADAM_BETAS
        moment.lerp_(gradient, 1.0 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        schedule = self._schedule
        rate = factor * (schedule.adam_rate if name == EMBEDDING else schedule.norm_rate)
        correction = (1.0 - second ** (step + 1)) ** 0.5
        rate *= correction / (1.0 - first ** (step + 1))
        weight.addcdiv_(moment, square.sqrt().add_(_ADAM_EPSILON), value=-rate)

    def step(self, gradients: NetworkWeights, factor: float, step: int, pool: Executor) -> None:
        """One update of every weight, the matrices shared out over the pool."""

        def update(name: str) -> None:
            with torch.no_grad():
                if name in self._squares:
                    self._adam(name, gradients[name], factor, step)
                else:
                    self._muon(name, gradients[name], factor)

        list(pool.map(update, self._weights))

    def state(self) -> dict[str, NetworkWeights]:
        """Tensors to keep in a checkpoint."""
        return {"moments": self._moments, "squares": self._squares}

    def restore(self, state: dict[str, NetworkWeights]) -> None:
        """Take the tensors of a checkpoint."""
        for name, value in state["moments"].items():
            self._moments[name].copy_(value)
        for name, value in state["squares"].items():
            self._squares[name].copy_(value)
