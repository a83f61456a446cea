"""Make the demo pair from a folder of texts.

python -m models.recipes.demo.train --data DIR --out DIR

A call that a signal, its --minutes or a dead machine has stopped is repeated as it was: it goes on
from the state it kept, with the same steps as if nothing had stopped it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.recipes.demo.evaluate import (
    evaluate_pair,
    read_evaluation,
    target_bits,
    write_evaluation,
)
from models.recipes.demo.export import export_checkpoint
from models.recipes.demo.network import NetworkWeights
from models.recipes.demo.pieces import Piece, UnfinishedError
from models.recipes.demo.recipe import DemoRecipe
from models.recipes.demo.stages import Stage, finished_target, train_draft, train_target
from models.recipes.demo.texts.corpus import load_corpus
from models.recipes.demo.texts.prepare import prepare

TARGET_FOLDER = "lexshard-demo"
DRAFT_FOLDER = "lexshard-demo-draft"
DEFAULT_SEED = 17
STOPPED = 3
"""Exit status of a call that was over before the training was."""


def _training_record(stage: Stage, recipe: DemoRecipe, seed: int) -> dict[str, Any]:
    return {
        "steps": stage.steps,
        "tokens": stage.tokens,
        "seconds": round(stage.seconds),
        "seed": seed,
        "workers": recipe.workers,
        "machine": f"{os.cpu_count()} {platform.machine()} CPU cores (torch {torch.__version__})",
        "schedule": stage.schedule,
        "held_out_bits_per_byte": stage.held_out_bits,
    }


def train_demo(
    data: Path,
    out: Path,
    seed: int,
    state: Path | None = None,
    work: Path | None = None,
    recipe: DemoRecipe | None = None,
    trained: Path | None = None,
    piece: Piece | None = None,
    decay_now: float | None = None,
) -> dict[str, Any]:
    """Train, export and evaluate the pair; returns the measurements.

    ``trained`` is the folder of a target that an earlier call made from the same texts with the
    same seed: it is kept, and only its draft is made anew. ``out`` receives one folder for the
    target and one for the draft. ``state`` is all that the next call needs to go on where ``piece``
    ends this one, on any machine; tokens in ``work`` save it minutes. ``decay_now`` ends the
    target's training early, with this share of its steps as the final decay. Raises
    FileNotFoundError where ``trained`` has no evaluation of an earlier call, UnfinishedError where
    ``piece`` was over first, ValueError where its tokenizer or the state's recipe is another.
    """
    recipe, piece = recipe or DemoRecipe(), piece or Piece()
    record = None if trained is None else read_evaluation(trained)["training"]["target"]
    state, work = state or out / "state", work or out / "work"
    for folder in (state, work):
        folder.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(data, recipe.mixture)
    prepared = prepare(corpus, state, work, recipe, seed)
    target_folder, draft_folder = out / TARGET_FOLDER, out / DRAFT_FOLDER

    def held_out_bits(weights: NetworkWeights) -> float:
        export_checkpoint(weights, recipe.target, prepared.tokenizer, target_folder)
        return target_bits(target_folder, corpus, prepared.sources, recipe.measurement)

    if trained is None:
        made = train_target(prepared, recipe, state, seed, piece, held_out_bits, decay_now)
        record, weights = _training_record(made, recipe, seed), made.weights
    else:
        weights = finished_target(trained, prepared)
    export_checkpoint(weights, recipe.target, prepared.tokenizer, target_folder)
    target = finished_target(target_folder, prepared)
    draft = train_draft(prepared, recipe, target, state, seed, piece)
    export_checkpoint(draft.weights, recipe.draft, prepared.tokenizer, draft_folder)
    result = evaluate_pair(
        target_folder, draft_folder, corpus, prepared.sources, recipe.measurement
    )
    result["training"] = {
        "files": corpus.files,
        "target": record,
        "draft": {**_training_record(draft, recipe, seed), "target_kept": trained is not None},
    }
    write_evaluation(result, target_folder)
    return result


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share < 1.0:
        raise argparse.ArgumentTypeError("a share is between 0 and 1")
    return share


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
        help="where tokens are kept, which are made anew where they are lost (default: OUT/work)",
    )
    add(
        "--state",
        type=Path,
        metavar="DIR",
        help="where the training is kept, about 105 MB, to go on from on this machine or another; "
        "a tokenizer.json put there before the first call is taken (default: OUT/state)",
    )
    add(
        "--minutes",
        type=float,
        metavar="M",
        help="stop training after so many minutes and keep its state, as SIGTERM and SIGINT do",
    )
    add(
        "--decay-now",
        type=_share,
        metavar="SHARE",
        help="let the target's final decay begin at the step it has reached and be this share of "
        "all its steps: 0.4 after 6 hours ends it in 4 more; nothing where it has begun",
    )
    add(
        "--target",
        type=Path,
        metavar="DIR",
        help="keep the target of this folder, made from the same texts with the same seed, and "
        "train its draft alone",
    )
    add(
        "--target-tokens",
        type=int,
        metavar="N",
        help="token budget of the target; a later call may change it until the final decay begins",
    )
    add("--draft-tokens", type=int, metavar="N", help="token budget of the draft")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the pair; returns the exit status, `STOPPED` where there is more to do."""
    given = _parser().parse_args(arguments)
    if given.target is not None and (given.target_tokens, given.decay_now) != (None, None):
        print(
            "error: a kept --target is not trained: leave --target-tokens and --decay-now out",
            file=sys.stderr,
        )
        return 1
    recipe = DemoRecipe().with_tokens(given.target_tokens, given.draft_tokens)
    try:
        result = train_demo(
            given.data,
            given.out,
            given.seed,
            state=given.state,
            work=given.work,
            recipe=recipe,
            trained=given.target,
            piece=Piece(given.minutes),
            decay_now=given.decay_now,
        )
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except UnfinishedError as stop:
        print(f"{stop}; the same command goes on", file=sys.stderr)
        return STOPPED
    rate = result["drawn_token_match_rate"]["mean"]
    bits = result["bits_per_byte"]["all"]["target"]
    print(f"target {bits:.3f} bits per byte; draft draws {100 * rate:.1f} % of its tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
