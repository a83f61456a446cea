"""``lexshard topology plan``: what would go where, before anything starts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lexshard.actors.configuration import NGRAM
from lexshard.cluster.models.folders import with_model_folders
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.commands.option_flags import add_option_flags, given_options
from lexshard.serve_app.start.preflight import check_model_folder
from lexshard.serve_app.start.readiness import StartupError

REFUSALS = (StartupError, ValueError, OSError)  # a bad configuration is a ValueError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the plan, then those of ``lexshard serve``, whose model and settings it is for."""
    parser.add_argument(
        "--nodes",
        nargs="+",
        metavar="NODE",
        help="such as '2x cpus=16,memory=64GiB,gpus=4,gpu_memory=80GiB' (default: this machine)",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    add_option_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit status."""
    config = with_model_folders(given_options(arguments).config(), tell, served=False)
    check_model_folder(config.model)
    if config.draft not in (None, NGRAM):
        check_model_folder(config.draft)
    # Seconds: a mistyped folder should not wait for it.
    from lexshard.cluster.topology.nodes import parse_nodes, this_machine
    from lexshard.cluster.topology.plan import configured_plan, describe

    nodes = parse_nodes(arguments.nodes) if arguments.nodes else (this_machine(),)
    plan = configured_plan(config, nodes)
    print(json.dumps(asdict(plan), indent=2) if arguments.json else describe(plan))
    return 0
