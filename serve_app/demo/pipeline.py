"""From a folder of texts to an evaluated checkpoint pair."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lexshard.serve_app.demo.card import write_cards
from lexshard.serve_app.demo.evaluate import evaluate_pair, read_evaluation, write_evaluation
from lexshard.serve_app.demo.export import export_checkpoint
from lexshard.serve_app.demo.recipe import DemoRecipe, Schedule
from lexshard.serve_app.demo.stages import Stage, finished_target, train_draft, train_target
from lexshard.serve_app.demo.texts.corpus import load_corpus
from lexshard.serve_app.demo.texts.prepare import prepare

TARGET_FOLDER = "lexshard-demo"
DRAFT_FOLDER = "lexshard-demo-draft"
DEFAULT_WORK_FOLDER = "work"


def _machine() -> str:
    return f"{os.cpu_count()} {platform.machine()} CPU cores (torch {torch.__version__})"


def _training_record(
    stage: Stage, schedules: Sequence[Schedule], recipe: DemoRecipe, seed: int
) -> dict[str, Any]:
    return {
        "steps": stage.steps,
        "tokens": stage.tokens,
        "seconds": round(stage.seconds),
        "seed": seed,
        "workers": recipe.workers,
        "machine": _machine(),
        "schedules": [asdict(schedule) for schedule in schedules],
    }


def train_demo(
    data: Path,
    out: Path,
    seed: int,
    work: Path | None = None,
    recipe: DemoRecipe | None = None,
    trained: Path | None = None,
) -> dict[str, Any]:
    """Train, export and evaluate the pair; returns the measurements.

    ``trained`` is the folder of a target that an earlier call made from the same texts with the
    same seed: it is kept, and only its draft is made anew. ``out`` receives one folder for the
    target and one for the draft. ``work`` keeps tokens and checkpoints; calling again with the same
    arguments continues where the last call stopped. Raises FileNotFoundError where ``trained`` has
    no evaluation of an earlier call, ValueError where its tokenizer is another.
    """
    recipe = recipe or DemoRecipe()
    if trained is not None:
        read_evaluation(trained)  # before minutes of work on the texts
    work = work or out / DEFAULT_WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    prepared = prepare(data, work, recipe, seed)
    if trained is None:
        target = train_target(prepared, recipe, work, seed)
    else:
        target = finished_target(trained, prepared)
    target_folder, draft_folder = out / TARGET_FOLDER, out / DRAFT_FOLDER
    export_checkpoint(target.weights, recipe.target, prepared.tokenizer, target_folder)
    draft = train_draft(prepared, recipe, target, work, seed)
    export_checkpoint(draft.weights, recipe.draft, prepared.tokenizer, draft_folder)
    corpus = load_corpus(data, recipe.mixture)
    result = evaluate_pair(
        target_folder, draft_folder, corpus, prepared.sources, recipe.measurement
    )
    result["training"] = {
        "files": corpus.files,
        "target": (
            _training_record(target, recipe.target_schedules, recipe, seed)
            if trained is None
            else read_evaluation(trained)["training"]["target"]
        ),
        "draft": {
            **_training_record(draft, [recipe.draft_schedule], recipe, seed),
            "target_kept": trained is not None,
        },
    }
    write_evaluation(result, target_folder)
    write_cards(result, recipe, target_folder, draft_folder)
    return result
