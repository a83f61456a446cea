"""``lexshard router train``: which output rows a draft model looks at in which context."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.cluster.models.refusal import LoadingOptions
from lexshard.serve_app.commands.argument_types import at_least

if TYPE_CHECKING:
    from lexshard.actors.drafter.router.texts import WrittenText


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("model", metavar="MODEL", help="the target: folder, or ORG/NAME on the Hub")
    parser.add_argument("draft", metavar="DRAFT", help="model folder of the draft")
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines (token_ids, messages, prompt or text) or plain text of what the target is "
        "asked (default: the bundled prompts)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: draft-router.tensors beside the draft"
    )
    parser.add_argument(
        "--hot", type=at_least(0), metavar="N", help="tokens always looked at (default: V / 64)"
    )
    parser.add_argument(
        "--clusters", type=at_least(2), metavar="M", help="of the other tokens (default: V / 64)"
    )
    parser.add_argument("--width", type=at_least(1), metavar="N", help="hidden units")
    parser.add_argument("--epochs", type=at_least(1), metavar="N", help="of training")
    parser.add_argument(
        "--steps", type=at_least(1), metavar="N", help="guesses of a draft that have own budgets"
    )
    parser.add_argument(
        "--share",
        type=float,
        metavar="S",
        help="of the vocabulary that a draft step may look at on average (default: 0.1)",
    )
    parser.add_argument(
        "--tokens", type=at_least(1), metavar="N", help="that the target writes after a prompt"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: one per core")


def run(arguments: argparse.Namespace) -> int:
    """Train and report; returns the exit status."""
    try:
        _train(arguments)
    except (ValueError, OSError) as error:  # among them every refusal of a model
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nlexshard: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


def _train(arguments: argparse.Namespace) -> None:
    missing = [str(path) for path in arguments.prompts or () if not path.is_file()]
    if missing:
        raise ValueError(f"no prompts at {', '.join(missing)}")
    if not Path(arguments.draft).is_dir():
        raise ValueError(f"no model folder at {arguments.draft}")
    target_folder = model_folder(arguments.model, tell, loading=LoadingOptions(device="cpu"))
    if not Path(target_folder).is_dir():
        raise ValueError(f"no model folder at {target_folder}")
    # Seconds: a mistyped name should not wait for it.
    import torch

    from lexshard.actors.body.loading import load
    from lexshard.actors.configuration import EngineConfiguration
    from lexshard.actors.drafter.router.build import (
        BUNDLED_PROMPTS,
        RouterSettings,
        Target,
        train_router,
    )
    from lexshard.actors.drafter.router.file import FILE_NAME, read_router_file
    from lexshard.actors.drafter.router.report import describe
    from lexshard.actors.drafter.router.texts import WrittenText
    from lexshard.actors.engine.completion import complete_with_seeds
    from lexshard.actors.engine.engine import Engine
    from lexshard.actors.index.build import own_rows
    from lexshard.actors.index.format import describe_weights
    from lexshard.actors.index.hidden import load_tokenizer
    from lexshard.actors.messages import SamplingParameters
    from lexshard.actors.states.noise_key import noise_key
    from lexshard.actors.text.traces import read_traces
    from lexshard.kernels import pool

    chosen = {
        name: getattr(arguments, name)
        for name in ("hot", "clusters", "width", "epochs", "steps", "share", "tokens", "seed")
        if getattr(arguments, name) is not None
    }
    settings = RouterSettings(**chosen)
    threads = arguments.threads or os.cpu_count() or 1
    draft = load(arguments.draft, device="cpu")
    engine = Engine(
        EngineConfiguration(model=target_folder, threads=threads, head="dense", device="cpu")
    )
    torch.set_num_threads(threads)
    pool.set_threads(threads)
    tokenizer = load_tokenizer(Path(target_folder))
    files = arguments.prompts or [BUNDLED_PROMPTS]
    prompts = read_traces(files, tokenizer, draft.vocabulary_size)
    out = arguments.out or Path(arguments.draft) / FILE_NAME

    def write(
        asked: Sequence[tuple[int, ...]], temperature: float, seeds: Sequence[int], count: int
    ) -> list[WrittenText]:
        parameters = SamplingParameters(temperature=temperature, max_tokens=count)
        return [
            WrittenText(done.prompt_ids, done.token_ids, temperature, noise_key(seed, 0))
            for done, seed in zip(
                complete_with_seeds(engine, asked, parameters, seeds), seeds, strict=True
            )
        ]

    print(
        f"lexshard router train: {arguments.draft} guesses for {arguments.model}; "
        f"{len(prompts.texts):,} prompts of {', '.join(prompts.sources)}; seed {settings.seed}; "
        f"{threads} threads",
        flush=True,
    )
    head = own_rows(engine.model)
    target = Target(
        Path(target_folder).resolve().name, describe_weights(head.weight, head.bias).hash, write
    )
    train_router(target, draft, prompts.texts, out, settings)
    weights = describe_weights(own_rows(draft).weight, None)
    print(describe(out, read_router_file(out, weights)))
