"""Training the target and the draft, each resumable from its own checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from serve_app.demo.distill import distillation_loss, projected_embedding
from serve_app.demo.network import EMBEDDING, Weights
from serve_app.demo.prepare import Prepared
from serve_app.demo.recipe import DemoRecipe
from serve_app.demo.train import Trainer


@dataclass(frozen=True)
class Stage:
    """What one finished stage leaves behind."""

    weights: Weights
    steps: int
    tokens: int
    seconds: float


def target_trainer(prepared: Prepared, recipe: DemoRecipe, seed: int) -> Trainer:
    """The target's trainer at its first step."""
    return Trainer(
        recipe.target,
        recipe.target_schedule,
        prepared.sources,
        prepared.frequent_first,
        seed,
        recipe.workers,
    )


def target_checkpoint(work: Path, seed: int) -> Path:
    """Where the target's training state is kept."""
    return work / f"target-{seed}.pt"


def train_target(prepared: Prepared, recipe: DemoRecipe, work: Path, seed: int) -> Stage:
    """Train the target, or continue from its checkpoint in ``work``."""
    trainer = target_trainer(prepared, recipe, seed)
    return _finish(trainer, "target", recipe, target_checkpoint(work, seed))


def train_draft(
    prepared: Prepared, recipe: DemoRecipe, target: Weights, work: Path, seed: int
) -> Stage:
    """Distil the draft from the finished target, or continue from its checkpoint."""
    trainer = Trainer(
        recipe.draft,
        recipe.draft_schedule,
        prepared.sources,
        prepared.frequent_first,
        seed + 1,
        recipe.workers,
        distillation_loss(target, recipe.target),
    )
    common = torch.from_numpy(prepared.frequent_first[: recipe.draft_schedule.frequent_tokens])
    trainer.weights[EMBEDDING].copy_(
        projected_embedding(target[EMBEDDING], recipe.draft.hidden, common)
    )
    return _finish(trainer, "draft", recipe, work / f"draft-{seed}.pt")


def _finish(trainer: Trainer, label: str, recipe: DemoRecipe, checkpoint: Path) -> Stage:
    if checkpoint.exists():
        trainer.restore(checkpoint)
    trainer.run(label, checkpoint, recipe.checkpoint_seconds)
    tokens = trainer.step * trainer.schedule.batch_tokens
    return Stage(trainer.weights, trainer.step, tokens, trainer.seconds)
