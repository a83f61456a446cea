"""Make the demo pair from a folder of texts.

python -m models.recipes.demo.train --data DIR --out DIR
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from models.recipes.demo.evaluate import evaluate_pair, read_evaluation, write_evaluation
from models.recipes.demo.export import export_checkpoint
from models.recipes.demo.recipe import DemoRecipe, Schedule
from models.recipes.demo.stages import Stage, finished_target, train_draft, train_target
from models.recipes.demo.texts.corpus import load_corpus
from models.recipes.demo.texts.prepare import prepare

TARGET_FOLDER = "lexshard-demo"
DRAFT_FOLDER = "lexshard-demo-draft"
DEFAULT_SEED = 17


def _training_record(
    stage: Stage, schedules: Sequence[Schedule], recipe: DemoRecipe, seed: int
) -> dict[str, Any]:
    return {
        "steps": stage.steps,
        "tokens": stage.tokens,
        "seconds": round(stage.seconds),
        "seed": seed,
        "workers": recipe.workers,
        "machine": f"{os.cpu_count()} {platform.machine()} CPU cores (torch {torch.__version__})",
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
    work = work or out / "work"
    work.mkdir(parents=True, exist_ok=True)
    prepared = prepare(data, work, recipe, seed)
    if trained is None:
        target = train_target(prepared, recipe, work, seed)
        record = _training_record(target, recipe.target_schedules, recipe, seed)
    else:
        target = finished_target(trained, prepared)
        record = read_evaluation(trained)["training"]["target"]
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
        "target": record,
        "draft": {
            **_training_record(draft, [recipe.draft_schedule], recipe, seed),
            "target_kept": trained is not None,
        },
    }
    write_evaluation(result, target_folder)
    return result


def _parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser("python -m models.recipes.demo.train", description=__doc__)
    add = options.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of texts: *.txt, *.txt.xz (documents divided by a line <|endoftext|>) and "
        "*.jsonl, *.jsonl.xz (dialogues)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="where the two checkpoints go")
    add("--seed", type=int, default=DEFAULT_SEED, metavar="N")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        help="where tokens and training checkpoints are kept, to resume from; one folder serves "
        "one data folder (default: OUT/work)",
    )
    add(
        "--target",
        type=Path,
        metavar="DIR",
        help="keep the target of this folder, made from the same texts with the same seed, and "
        "train its draft alone",
    )
    add("--target-tokens", type=int, metavar="N", help="token budget of the target")
    add("--draft-tokens", type=int, metavar="N", help="token budget of the draft")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the pair; returns the exit status."""
    given = _parser().parse_args(arguments)
    if given.target is not None and given.target_tokens is not None:
        print("error: a kept --target is not trained: leave --target-tokens out", file=sys.stderr)
        return 1
    recipe = DemoRecipe().with_tokens(given.target_tokens, given.draft_tokens)
    try:
        result = train_demo(given.data, given.out, given.seed, given.work, recipe, given.target)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rate = result["drawn_token_match_rate"]["mean"]
    bits = result["bits_per_byte"]["all"]["target"]
    print(f"target {bits:.3f} bits per byte; draft draws {100 * rate:.1f} % of its tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
