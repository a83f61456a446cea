"""``lexshard index build``: the vocabulary index of a model, with a report of what it is worth."""

from __future__ import annotations

import argparse
from pathlib import Path

from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.cluster.models.refusal import LoadingOptions
from lexshard.serve_app.commands.argument_types import at_least, file_path

REFUSALS = (ValueError, OSError)  # among them every refusal of a model
INTERRUPTED = "the same command goes on where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("model", metavar="MODEL", help="folder, or ORG/NAME on the Hub")
    parser.add_argument(
        "--out",
        type=file_path,
        metavar="FILE",
        help="default: vocabulary.lexshard beside the model, or in the user's cache where "
        "the model's folder cannot be written or is of the Hub's cache",
    )
    parser.add_argument("--tiers", metavar="LIST", help="divided by commas (default: every kind)")
    parser.add_argument(
        "--clusters", type=at_least(0), metavar="N", help="default: 0.015 per token; 0: none"
    )
    parser.add_argument("--kind", choices=("euclidean", "spherical"), default="euclidean")
    parser.add_argument(
        "--iterations", type=at_least(1), default=15, metavar="N", help="of k-means"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="default: one per core")


def run(arguments: argparse.Namespace) -> None:
    """Build and report."""
    if arguments.out is not None and arguments.out.is_dir():
        raise IsADirectoryError(f"--out {arguments.out} is a folder: name a file in it")
    folder = model_folder(arguments.model, tell, loading=LoadingOptions(arguments.dtype))
    if not Path(folder).is_dir():
        raise ValueError(f"no model folder at {arguments.model}")
    import torch  # seconds: a mistyped folder should not wait for it

    from lexshard.actors.body.loading import load
    from lexshard.actors.index.automatic import default_index_path
    from lexshard.actors.index.build import (
        TIER_KINDS,
        IndexSettings,
        build_index,
        cluster_count,
        own_rows,
    )
    from lexshard.actors.index.format import describe_weights
    from lexshard.actors.index.report import describe
    from lexshard.kernels import pool
    from lexshard.kernels.team.cores import available_cores

    threads = arguments.threads or available_cores()
    torch.set_num_threads(threads)
    pool.set_threads(threads)
    tiers = TIER_KINDS if arguments.tiers is None else tuple(arguments.tiers.split(","))
    settings = IndexSettings(
        tiers=tiers,
        clusters=arguments.clusters,
        kind=arguments.kind,
        iterations=arguments.iterations,
        seed=arguments.seed,
    )
    model = load(folder, arguments.dtype)
    head = own_rows(model)
    weights = describe_weights(head.weight, head.bias)
    out = arguments.out or default_index_path(folder, weights)
    count = cluster_count(settings, weights.rows)
    clusters = f"{count:,} {settings.kind}, {settings.iterations} iterations"
    decisions = {
        "model": arguments.model,
        "out": out,
        "output weights": f"{weights.rows:,} x {weights.columns:,} {weights.dtype}",
        "tiers": ", ".join(settings.tiers),
        "clusters": clusters if count else "none",
        "seed": settings.seed,
        "threads": threads,
    }
    lines = "\n".join(f"  {name:<24} {value}" for name, value in decisions.items())
    print(f"lexshard index build with:\n{lines}", flush=True)
    header = build_index(folder, model, out, settings)
    print(describe(out, header.metadata()))
