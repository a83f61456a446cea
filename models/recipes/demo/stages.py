"""Training the target and the draft, each resumable from its own state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from models.recipes.demo.distill import distillation_loss, projected_embedding
from models.recipes.demo.network import EMBEDDING, NetworkWeights
from models.recipes.demo.pieces import Piece, UnfinishedError, read_state, write_state
from models.recipes.demo.recipe import DemoRecipe
from models.recipes.demo.texts.prepare import Prepared
from models.recipes.demo.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Stage:
    """What one finished stage leaves behind."""

    weights: NetworkWeights
    steps: int
    tokens: int
    seconds: float
    schedule: dict[str, Any]
    held_out_bits: dict[str, float] = field(default_factory=dict)
    """Bits per byte of the last weights and of their average; the better ones are kept."""


def train_target(
    prepared: Prepared,
    recipe: DemoRecipe,
    state: Path,
    seed: int,
    piece: Piece,
    held_out_bits: Callable[[NetworkWeights], float],
    decay_now: float | None = None,
) -> Stage:
    """Train the target, or continue from its state; what measures better of its weights is kept.

    Raises UnfinishedError where the piece was over first, ValueError where the state is of another
    recipe, or where there is none and ``decay_now`` asks for the end.
    """
    schedule = recipe.target_schedule
    trainer = Trainer(recipe.target, schedule, prepared, seed, recipe.workers)
    path = state / "target.pt"
    kept = read_state(path, trainer.made_by)
    if kept is not None and "stage" in kept:
        return Stage(**kept["stage"])
    if kept is None and decay_now is not None:
        raise ValueError(f"nothing to end: {path} does not exist")
    stage = _finish(trainer, "target", recipe, path, kept, piece, decay_now)
    if trainer.average:
        candidates = {"last": trainer.weights, "average": trainer.average}
        bits = {name: held_out_bits(weights) for name, weights in candidates.items()}
        best = candidates[min(bits, key=bits.__getitem__)]
        stage = Stage(
            best, stage.steps, stage.tokens, stage.seconds, stage.schedule, held_out_bits=bits
        )
    # The choice is kept, for a machine that measures otherwise in the last digit would give the
    # half-trained draft another target.
    write_state(path, {"made_by": trainer.made_by, "stage": asdict(stage)})
    return stage


def finished_target(folder: Path, prepared: Prepared) -> NetworkWeights:
    """The target in ``folder``, as it was exported.

    Raises ValueError where it has another tokenizer than the draft would get.
    """
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    if vocabulary != prepared.tokenizer.get_vocab():
        raise ValueError(
            f"the target in {folder} has another tokenizer than these texts give with this seed"
        )
    stored = load_file(folder / "model.safetensors")
    return {name: value.float() for name, value in stored.items()}


def train_draft(
    prepared: Prepared,
    recipe: DemoRecipe,
    target: NetworkWeights,
    state: Path,
    seed: int,
    piece: Piece,
) -> Stage:
    """Distil the draft from the finished target, or continue from its state."""
    teacher = hashlib.sha256()
    for name in sorted(target):
        teacher.update(target[name].numpy().tobytes())
    trainer = Trainer(
        recipe.draft,
        recipe.draft_schedule,
        prepared,
        seed + 1,
        recipe.workers,
        distillation_loss(target, recipe.target),
        teacher.hexdigest()[:12],
    )
    common = torch.from_numpy(prepared.frequent_first[: recipe.draft_schedule.frequent_tokens])
    embedding = projected_embedding(target[EMBEDDING], recipe.draft.hidden, common)
    trainer.start_from({EMBEDDING: embedding})
    path = state / "draft.pt"
    return _finish(trainer, "draft", recipe, path, read_state(path, trainer.made_by), piece)


def _finish(
    trainer: Trainer,
    label: str,
    recipe: DemoRecipe,
    path: Path,
    kept: dict[str, Any] | None,
    piece: Piece,
    decay_now: float | None = None,
) -> Stage:
    if kept is not None:
        trainer.restore(kept)
    if decay_now is not None:
        trainer.decay_now(decay_now)
    ended = trainer.run(label, path, recipe.checkpoint_seconds, piece)
    schedule = trainer.schedule
    if not ended:
        raise UnfinishedError(f"{label} stopped after step {trainer.step:,} of {schedule.steps:,}")
    tokens = trainer.step * schedule.batch_tokens
    return Stage(trainer.weights, trainer.step, tokens, trainer.seconds, asdict(schedule))
