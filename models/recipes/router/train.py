"""Train which output rows a draft model looks at in which context.

python -m models.recipes.router.train TARGET DRAFT
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.router.file import FILE_NAME, read_router_file
from lexshard.actors.engine.engine import Engine
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.hidden import load_tokenizer
from lexshard.actors.text.traces import read_traces
from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.cluster.models.refusal import LoadingOptions
from lexshard.kernels import pool
from lexshard.loadtest.draft_heads.texts import written_texts
from lexshard.serve_app.commands.argument_types import at_least
from models.recipes.router.report import describe
from models.recipes.router.training import BUNDLED_PROMPTS, RouterSettings, Target, train_router


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser("python -m models.recipes.router.train", description=__doc__)
    add, default = options.add_argument, RouterSettings()
    add("model", metavar="MODEL", help="the target: folder, or ORG/NAME on the Hub")
    add("draft", metavar="DRAFT", type=Path, help="model folder of the draft")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=[BUNDLED_PROMPTS],
        metavar="FILE",
        help="JSON lines (token_ids, messages, prompt or text) or plain text of what the target is "
        "asked (default: the prompts beside this recipe)",
    )
    add("--out", type=Path, metavar="FILE", help="default: draft-router.tensors beside the draft")
    numbers = (
        ("hot", 0, "tokens always looked at (default: V / 64)"),
        ("clusters", 2, "of the other tokens (default: V / 64)"),
        ("width", 1, "hidden units (default: %(default)s)"),
        ("epochs", 1, "of training (default: %(default)s)"),
        ("steps", 1, "guesses of a draft that have own budgets (default: %(default)s)"),
        ("tokens", 1, "that the target writes after a prompt (default: %(default)s)"),
        ("seed", 0, "of texts, clusters and network (default: %(default)s)"),
    )
    for name, least, text in numbers:
        value = getattr(default, name)
        add(f"--{name}", type=at_least(least), default=value, metavar="N", help=text)
    add(
        "--share",
        type=float,
        default=default.share,
        metavar="S",
        help="of the vocabulary that a draft step may look at on average (default: %(default)s)",
    )
    cores = os.cpu_count() or 1
    add("--threads", type=at_least(1), default=cores, metavar="N", help="default: one per core")
    return options


def run(given: argparse.Namespace) -> None:
    """Train, and print what the router is worth.

    Raises ValueError (among them every refusal of a model) and OSError.
    """
    missing = [str(path) for path in given.prompts if not path.is_file()]
    if missing:
        raise ValueError(f"no prompts at {', '.join(missing)}")
    if not given.draft.is_dir():
        raise ValueError(f"no model folder at {given.draft}")
    folder = Path(model_folder(given.model, tell, loading=LoadingOptions(device="cpu")))
    if not folder.is_dir():
        raise ValueError(f"no model folder at {folder}")
    names = ("hot", "clusters", "width", "epochs", "steps", "share", "tokens", "seed")
    settings = RouterSettings(**{name: getattr(given, name) for name in names})
    draft = load(given.draft, device="cpu")
    engine = Engine(
        EngineConfiguration(model=str(folder), threads=given.threads, head="dense", device="cpu")
    )
    torch.set_num_threads(given.threads)
    pool.set_threads(given.threads)
    prompts = read_traces(given.prompts, load_tokenizer(folder), draft.vocabulary_size)

    print(
        f"router: {given.draft} guesses for {given.model}; {len(prompts.texts):,} prompts of "
        f"{', '.join(prompts.sources)}; seed {settings.seed}; {given.threads} threads",
        flush=True,
    )
    head = own_rows(engine.model)
    weights = describe_weights(head.weight, head.bias).hash
    out = given.out or given.draft / FILE_NAME
    train_router(
        Target(folder.resolve().name, weights, partial(written_texts, engine)),
        draft,
        prompts.texts,
        out,
        settings,
    )
    own = describe_weights(own_rows(draft).weight, None)
    print(describe(out, read_router_file(out, own)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a router; returns the exit status."""
    given = parser().parse_args(arguments)
    try:
        run(given)
    except (ValueError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nrouter: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
