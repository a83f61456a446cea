"""The training loop, shared by the target and the draft."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from models.recipes.demo.pieces import Piece, write_state
from models.recipes.demo.recipe import NetworkShape, Schedule
from models.recipes.demo.texts.prepare import Prepared
from models.recipes.demo.texts.windows import BatchOrder

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, SoftmaxCandidates | None], Tensor]
"""``(hidden, head, inputs, targets, candidates)`` to the summed loss of a micro batch."""

REPORT_SECONDS = 30.0
SMOOTHED_STEPS = 100


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
        prepared: Prepared,
        seed: int,
        workers: int,
        loss: LossFunction = next_token_loss,
        teacher: str = "",
    ) -> None:
        # No step before the final decay depends on the budget.
        named = {"shape": asdict(shape), "schedule": asdict(replace(schedule, tokens=0))}
        self.made_by = {
            **{f"{part}.{name}": value for part in named for name, value in named[part].items()},
            "seed": seed,
            "texts": prepared.digest,
            "teacher": teacher,
        }
        self.shape = shape
        self.weights = initial_weights(shape, seed)
        self.average: NetworkWeights = {}
        self.losses: list[float] = []
        self.seconds = 0.0
        self._prepared, self._seed = prepared, seed
        self._follow(schedule)
        self._optimiser = Optimiser(self.weights, schedule)
        self._table = rotary_table(shape, max(schedule.sequence, schedule.long_sequence))
        self._workers = workers
        self._loss = loss

    def _follow(self, schedule: Schedule) -> None:
        """Take the steps to come from this schedule; batch and candidates follow from a step."""
        self.schedule = schedule
        self._batches = BatchOrder(self._prepared.sources, schedule, self._seed)
        self._sampler = CandidateSampler(self._prepared.frequent_first, schedule, self._seed)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return len(self.losses)

    def start_from(self, weights: NetworkWeights) -> None:
        """Replace initial weights before the first step."""
        for name, value in weights.items():
            self.weights[name].copy_(value)

    def decay_now(self, share: float) -> None:
        """Let the final decay begin here, unless it has begun, and be ``share`` of all steps."""
        if self.step < self.schedule.decay_start:
            self._follow(self.schedule.ended_early(self.step, share))

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
        if schedule.average_fraction:
            rate = schedule.average_rate(self.step)
            for name, value in self.weights.items():
                self.average.setdefault(name, value.clone()).lerp_(value, rate)
        return total / count

    def run(self, label: str, path: Path, save_seconds: float, piece: Piece) -> bool:
        """Train until the schedule ends or the piece is over; whether the schedule has ended.

        The state is kept in ``path`` every ``save_seconds`` and at the end.
        """
        saved = told = begun = time.monotonic()
        earlier, first = self.seconds, self.step
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(self._workers, initializer=lambda: torch.set_num_threads(1))
        with pool, piece.hearing_signals():
            while self.step < self.schedule.steps and not piece.over():
                self.losses.append(self._train_step(pool))
                now = time.monotonic()
                self.seconds = earlier + now - begun
                if now - told >= REPORT_SECONDS or self.step == self.schedule.steps:
                    self._report(label, (now - begun) / (self.step - first))
                    told = now
                if now - saved >= save_seconds:
                    self.save(path)
                    saved = now
            self.save(path)
        torch.set_num_threads(threads)
        return self.step == self.schedule.steps

    def _report(self, label: str, step_seconds: float) -> None:
        recent = self.losses[-SMOOTHED_STEPS:]
        minutes = round((self.schedule.steps - self.step) * step_seconds / 60)
        print(
            f"{label}: step {self.step:,} of {self.schedule.steps:,}, "
            f"loss {sum(recent) / len(recent):.3f}, "
            f"{self.schedule.batch_tokens / step_seconds:,.0f} tokens/s, "
            f"{minutes // 60} h {minutes % 60:02} min left",
            file=sys.stderr,
            flush=True,
        )

    def save(self, path: Path) -> None:
        """Keep all that the next step depends on."""
        state = {
            "made_by": self.made_by,
            "schedule": asdict(self.schedule),
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "seconds": self.seconds,
            "weights": self.weights,
            "average": self.average,
            "optimiser": self._optimiser.state(),
        }
        write_state(path, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `save` kept; a final decay that has begun there keeps its length."""
        self.losses = state["losses"].tolist()
        kept = Schedule(**state["schedule"])
        if self.step >= min(kept.decay_start, self.schedule.decay_start):
            self._follow(kept)
        self.seconds = state["seconds"]
        self.start_from(state["weights"])
        self.average = state["average"]
        self._optimiser.restore(state["optimiser"])
