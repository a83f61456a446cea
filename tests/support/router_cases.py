"""Routers made by hand, and a target and a draft small enough to train one in a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.batch import whole_text
from lexshard.actors.body.loading import load
from lexshard.actors.drafter.router.file import RouterFile, Spread, TrainingReport
from lexshard.actors.index.build import own_rows
from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.kernels.noise import gumbel_row
from lexshard.loadtest.draft_heads.texts import (
    DraftPositions,
    Tokens,
    WrittenText,
    draft_positions,
    draftable,
)
from tests.support.tiny_models import save_tiny

WIDTH = 16

_REPORT = TrainingReport(
    target="by hand",
    seed=0,
    prompts=0,
    written_tokens=0,
    temperatures=(),
    hot_tokens=0,
    cluster_sizes=Spread(0, 0, 0),
    epochs=0,
    losses=(),
    recall=(),
    accepted={},
    share={},
)


def router_file(cluster_of: npt.NDArray[np.int32], depth: int, *, seed: int = 0) -> RouterFile:
    """Random weights over these clusters, the first of which is always looked at."""
    random = np.random.default_rng(seed)
    clusters = int(cluster_of.max()) + 1

    def some(*shape: int) -> npt.NDArray[np.float32]:
        return random.standard_normal(shape).astype(np.float32)

    return RouterFile(
        cluster_of=cluster_of,
        frequent=random.permutation(len(cluster_of)).astype(np.int32),
        always=np.zeros(1, np.int32),
        inner=some(WIDTH, 2 * depth),
        inner_bias=some(WIDTH),
        outer=some(clusters, WIDTH),
        outer_bias=some(clusters),
        budgets=np.array([3, 1], np.int32),
        report=_REPORT,
    )


class TinyPair:
    """A random model that is its own draft."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_tiny("qwen2", folder / "model", use_sliding_window=False)
        self.draft = load(self.folder, device="cpu")
        self.body = draftable(self.draft)
        self.weight = own_rows(self.draft).weight.float()
        self.size = len(self.weight)
        random = np.random.default_rng(5)
        self.prompts = [tuple(ids) for ids in random.integers(0, self.size, (16, 5)).tolist()]
        self.written = 0  # calls

    def write(
        self, prompts: Sequence[Tokens], temperature: float, seeds: Sequence[int], count: int
    ) -> list[WrittenText]:
        self.written += 1
        return [
            self._continued(prompt, temperature, seed, count)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

    def _continued(self, prompt: Tokens, temperature: float, key: int, count: int) -> WrittenText:
        ids = list(prompt)
        self.body.allocate_cache(-(-(len(prompt) + count) // BLOCK_SIZE))
        for _ in range(count):
            last = np.array([len(ids) - 1], np.int32)
            logits = self.body.forward(whole_text(ids, last)).numpy() @ self.weight.numpy().T
            ids.append(self.drawn(logits[0], temperature, key, len(ids)))
        return WrittenText(prompt, tuple(ids[len(prompt) :]), temperature, key)

    def drawn(
        self,
        logits: npt.NDArray[np.float32],
        temperature: float,
        key: int,
        place: int,
        best: int = 0,
    ) -> int:
        """The token drawn, or the one that is ``best`` places behind it."""
        if temperature:
            logits = logits / temperature + gumbel_row(key, place, self.size)
        return int(np.argsort(-logits)[best])


def some_positions(pair: TinyPair, count: int) -> DraftPositions:
    """Positions of random texts, half of them greedy; a third of the drawn tokens are the draft's
    own guess, the others next to it."""
    random = np.random.default_rng(9)
    texts = [
        WrittenText(
            pair.prompts[number % 16],
            tuple(random.integers(0, pair.size, 10).tolist()),
            0.8 * (number % 2),
            100 + number,
        )
        for number in range(count // 10)
    ]
    positions = draft_positions(pair.body, texts)
    logits = positions.hidden @ pair.weight.numpy().T
    drawn = [
        pair.drawn(
            logits[row],
            0.8 * (positions.inverse_temperature[row] > 0),
            int(positions.key[row]),
            int(positions.place[row]),
            best=int(random.integers(0, 3)),
        )
        for row in range(count)
    ]
    return dataclasses.replace(positions, drawn=np.array(drawn, np.int32))
