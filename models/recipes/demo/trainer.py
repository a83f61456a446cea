"""The training loop, shared by the target and the draft."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from models.recipes.demo.candidates import CandidateSampler, SoftmaxCandidates
from models.recipes.demo.loss import fused_cross_entropy
from models.recipes.demo.network import (
    EMBEDDING,
    NetworkWeights,
    hidden_states,
    initial_weights,
    rotary_table,
)
from models.recipes.demo.optimiser import Optimiser
from models.recipes.demo.recipe import NetworkShape, Schedule
from models.recipes.demo.texts.windows import BatchOrder, TokenSource

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, SoftmaxCandidates | None], Tensor]
"""``(hidden, head, inputs, targets, candidates)`` to the summed loss of a micro batch."""


def next_token_loss(
    hidden: Tensor,
    head: Tensor,
    inputs: Tensor,
    targets: Tensor,
    candidates: SoftmaxCandidates | None,
) -> Tensor:
    """Plain next-token cross entropy."""
    if candidates is None:
        return fused_cross_entropy(hidden, head, targets.reshape(-1))
    places = candidates.places[targets.reshape(-1)]
    return fused_cross_entropy(hidden, head, places, candidates.bias)


def _gradient(value: Tensor) -> Tensor:
    """The gradient that a backward pass has left on a leaf."""
    if value.grad is None:
        raise RuntimeError("a weight took no part in the loss")
    return value.grad


class Trainer:
    """Trains one network on seeded batches; the same seed gives the same weights.

    Each worker thread runs forward and backward on its own share of the micro batches with one
    torch thread; gradients are added in a fixed order.
    """

    def __init__(
        self,
        shape: NetworkShape,
        schedule: Schedule,
        sources: list[TokenSource],
        frequent_first: np.ndarray,
        seed: int,
        workers: int,
        loss: LossFunction = next_token_loss,
    ) -> None:
        self.shape = shape
        self.schedule = schedule
        self.weights = initial_weights(shape, seed)
        self.step = 0
        self.seconds = 0.0
        self._optimiser = Optimiser(self.weights, schedule)
        self._batches = BatchOrder(sources, schedule, seed)
        self._sampler = CandidateSampler(frequent_first, schedule, seed)
        self._table = rotary_table(shape, max(schedule.sequence, schedule.long_sequence))
        self._workers = workers
        self._loss = loss

    def start_from(self, weights: NetworkWeights) -> None:
        """Replace initial weights before the first step."""
        for name, value in weights.items():
            self.weights[name].copy_(value)

    def _share(
        self, micro_batches: list[np.ndarray], candidates: SoftmaxCandidates | None
    ) -> tuple[float, NetworkWeights]:
        """Loss and gradients of one worker's micro batches."""
        replica = {name: value.detach().requires_grad_() for name, value in self.weights.items()}
        head = replica[EMBEDDING]
        if candidates is not None:
            head = self.weights[EMBEDDING][candidates.identities].requires_grad_()
        total = 0.0
        for micro_batch in micro_batches:
            tokens = torch.from_numpy(micro_batch)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            table = (self._table[0][: inputs.shape[1]], self._table[1][: inputs.shape[1]])
            hidden = hidden_states(replica, self.shape, inputs, table)
            loss = self._loss(hidden, head, inputs, targets, candidates)
            loss.backward()
            total += float(loss.detach())
        gradients = {name: _gradient(value) for name, value in replica.items()}
        if candidates is not None:
            gradients[EMBEDDING].index_add_(0, candidates.identities, _gradient(head))
        return total, gradients

    def _train_step(self, pool: ThreadPoolExecutor) -> float:
        schedule = self.schedule
        batch = self._batches.batch(self.step)
        length = batch.shape[1] - 1
        candidates = self._sampler.candidates(self.step, batch[:, 1:])
        rows = max(1, schedule.micro_tokens // length)
        micro_batches = [batch[begin : begin + rows] for begin in range(0, len(batch), rows)]
        workers = min(self._workers, len(micro_batches))
        shares = [
            pool.submit(self._share, micro_batches[worker::workers], candidates)
            for worker in range(workers)
        ]
        total, gradients = shares[0].result()
        for share in shares[1:]:
            more, others = share.result()
            total += more
            for name, value in others.items():
                gradients[name].add_(value)
        count = batch.shape[0] * length
        for value in gradients.values():
            value.mul_(1.0 / count)
        self._optimiser.step(gradients, schedule.rate_factor(self.step), self.step, pool)
        self.step += 1
        return total / count

    def run(
        self,
        label: str,
        checkpoint: Path | None = None,
        checkpoint_seconds: float = 300.0,
        stop_after: int | None = None,
    ) -> None:
        """Train to the end of the schedule, or for ``stop_after`` steps."""
        last = self.schedule.steps
        if stop_after is not None:
            last = min(last, self.step + stop_after)
        saved = begun = time.monotonic()
        earlier = self.seconds
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(self._workers, initializer=lambda: torch.set_num_threads(1))
        bar = tqdm(total=self.schedule.steps, initial=self.step, desc=label, unit="step")
        average = None
        with pool, bar:
            while self.step < last:
                loss = self._train_step(pool)
                average = loss if average is None else 0.95 * average + 0.05 * loss
                bar.set_postfix(loss=f"{average:.3f}", refresh=False)
                bar.update()
                now = time.monotonic()
                self.seconds = earlier + now - begun
                if checkpoint is not None and now - saved >= checkpoint_seconds:
                    self.save(checkpoint)
                    saved = now
        torch.set_num_threads(threads)
        if checkpoint is not None:
            self.save(checkpoint)

    def save(self, path: Path) -> None:
        """Write a checkpoint in one piece."""
        partial = path.with_suffix(".partial")
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "weights": self.weights,
            "optimiser": self._optimiser.state(),
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.start_from(state["weights"])
        self._optimiser.restore(state["optimiser"])
