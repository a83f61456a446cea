"""A small model with an index, and progress that can be interrupted."""

from __future__ import annotations

from pathlib import Path

import torch

from lexshard.actors.body.loading import load
from lexshard.actors.index.build import TIER_KINDS, IndexSettings, build_index, own_rows
from lexshard.actors.index.format import Index, describe_weights, read_index
from tests.support.tiny_models import save_tiny

SETTINGS = IndexSettings(clusters=9, iterations=4, seed=5)
STEPS = ["calibration", "clusters", *(f"tier.{kind}" for kind in TIER_KINDS), "writing"]


class Silent:
    """Progress that is kept for the test to read."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, step: str) -> None:
        self.begun.append(step)

    def advance(self, share: float) -> None:
        pass

    def close(self) -> None:
        pass


class Interrupted(Silent):
    """Raises when a step begins, or in its middle."""

    def __init__(self, step: str, *, within: bool = False) -> None:
        super().__init__()
        self._step, self._within = step, within

    def begin(self, step: str) -> None:
        super().begin(step)
        if step == self._step and not self._within:
            raise KeyboardInterrupt

    def advance(self, share: float) -> None:
        if self.begun[-1] == self._step:
            raise KeyboardInterrupt


class Tiny:
    """A random model with biases and without a tokenizer, and its index."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_tiny("phi", folder / "model")
        self.model = load(self.folder, device="cpu")
        self.head = own_rows(self.model)
        self.path = folder / "index.safetensors"
        build_index(self.folder, self.model, self.path, SETTINGS, progress=Silent())

    def load(self, path: Path | None = None) -> Index:
        return load_index(path or self.path, self.head.weight, self.head.bias)


def load_index(
    path: str | Path, weight: torch.Tensor, bias: torch.Tensor | None, tiers: tuple | None = None
) -> Index:
    """The index at ``path`` for these output weights."""
    return read_index(Path(path), describe_weights(weight, bias), tiers)
