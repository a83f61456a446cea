"""Training the target and the draft, each resumable from its own checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.recipes.demo.distill import distillation_loss, projected_embedding
from models.recipes.demo.evaluate import read_evaluation
from models.recipes.demo.network import EMBEDDING, NetworkWeights
from models.recipes.demo.recipe import DemoRecipe
from models.recipes.demo.texts.prepare import Prepared
from models.recipes.demo.trainer import Trainer


@dataclass(frozen=True)
class Stage:
    """What one finished stage leaves behind."""

    weights: NetworkWeights
    steps: int
    tokens: int
    seconds: float

    def after(self, earlier: Stage) -> Stage:
        """This stage with the work of the one before counted in."""
        return Stage(
            self.weights,
            self.steps + earlier.steps,
            self.tokens + earlier.tokens,
            self.seconds + earlier.seconds,
        )


def target_trainer(prepared: Prepared, recipe: DemoRecipe, seed: int, number: int) -> Trainer:
    """The trainer of the target's pass ``number`` at its first step."""
    return Trainer(
        recipe.target,
        recipe.target_schedules[number],
        prepared.sources,
        prepared.frequent_first,
        seed + 2 * number,
        recipe.workers,
    )


def target_checkpoint(work: Path, seed: int, number: int) -> Path:
    """Where the training state of the target's pass ``number`` is kept."""
    return work / f"target-{seed}-{number}.pt"


def train_target(prepared: Prepared, recipe: DemoRecipe, work: Path, seed: int) -> Stage:
    """Train the target in all its passes, or continue from its checkpoints in ``work``."""
    whole: Stage | None = None
    for number in range(len(recipe.target_schedules)):
        trainer = target_trainer(prepared, recipe, seed, number)
        if whole is not None:
            trainer.start_from(whole.weights)
        checkpoint = target_checkpoint(work, seed, number)
        part = _finish(trainer, f"target {number + 1}", recipe, checkpoint)
        whole = part if whole is None else part.after(whole)
    if whole is None:
        raise ValueError("the recipe has no schedule for the target")
    return whole


def finished_target(folder: Path, prepared: Prepared) -> Stage:
    """The target that an earlier run left in ``folder``, as it was exported.

    Raises ValueError where it has another tokenizer than the draft would get.
    """
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    if vocabulary != prepared.tokenizer.get_vocab():
        raise ValueError(
            f"the target in {folder} has another tokenizer than these texts give with this seed"
        )
    record = read_evaluation(folder)["training"]["target"]
    stored = load_file(folder / "model.safetensors")
    weights = {name: value.float() for name, value in stored.items()}
    return Stage(weights, record["steps"], record["tokens"], record["seconds"])


def train_draft(
    prepared: Prepared, recipe: DemoRecipe, target: Stage, work: Path, seed: int
) -> Stage:
    """Distil the draft from the finished target, or continue from its checkpoint.

    A target trained for more steps gets a new draft.
    """
    trainer = Trainer(
        recipe.draft,
        recipe.draft_schedule,
        prepared.sources,
        prepared.frequent_first,
        seed + 1,
        recipe.workers,
        distillation_loss(target.weights, recipe.target),
    )
    common = torch.from_numpy(prepared.frequent_first[: recipe.draft_schedule.frequent_tokens])
    embedding = projected_embedding(target.weights[EMBEDDING], recipe.draft.hidden, common)
    trainer.start_from({EMBEDDING: embedding})
    return _finish(trainer, "draft", recipe, work / f"draft-{seed}-{target.steps}.pt")


def _finish(trainer: Trainer, label: str, recipe: DemoRecipe, checkpoint: Path) -> Stage:
    if checkpoint.exists():
        trainer.restore(checkpoint)
    trainer.run(label, checkpoint, recipe.checkpoint_seconds)
    tokens = trainer.step * trainer.schedule.batch_tokens
    return Stage(trainer.weights, trainer.step, tokens, trainer.seconds)
