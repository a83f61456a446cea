"""``lexshard topology plan``: what would go where, before anything starts."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from lexshard.actors.configuration import NGRAM
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.models.folders import with_model_folders
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.commands.argument_types import at_least
from lexshard.serve_app.commands.option_flags import add_option_flags, given_options
from lexshard.serve_app.start.preflight import check_model_folder
from lexshard.serve_app.start.readiness import StartupError

REFUSALS = (StartupError, ValueError, OSError)  # a bad configuration is a ValueError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the plan, then those of ``lexshard serve``, whose model and settings it is for."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--nodes",
        nargs="+",
        metavar="NODE",
        help="such as '2x cpus=16,memory=64GiB,gpus=4,gpu_memory=80GiB' (default: this machine)",
    )
    where.add_argument(
        "--forecast",
        nargs="+",
        type=at_least(1),
        metavar="N",
        help="so many GPUs, such as 8 64 1024, in the place of nodes: what 1, 2, 4 and 8 of them "
        "to a replica would give, by a formula",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument("--gpu", choices=("h100", "h200"), help="of --forecast (default h200)")
    parser.add_argument(
        "--context",
        type=at_least(1),
        metavar="N",
        help="tokens of a sequence, for --forecast (default 2048)",
    )
    add_option_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit status."""
    given = given_options(arguments).config().with_absolute_paths()
    config = with_model_folders(given, tell, served=False)
    check_model_folder(config.model)
    if config.draft not in (None, NGRAM):
        check_model_folder(config.draft)
    if arguments.forecast:
        return _forecast(arguments, config)
    if arguments.gpu or arguments.context:
        raise ValueError("--gpu and --context are of a forecast: give --forecast, or neither")
    # Seconds: a mistyped folder should not wait for it.
    from lexshard.cluster.topology.nodes import parse_nodes, this_machine
    from lexshard.cluster.topology.plan import configured_plan, describe

    nodes = parse_nodes(arguments.nodes) if arguments.nodes else (this_machine(),)
    plan = configured_plan(config, nodes)
    print(json.dumps(asdict(plan), indent=2) if arguments.json else describe(plan))
    return 0


def _forecast(arguments: argparse.Namespace, config: ServeConfig) -> int:
    from lexshard.cluster.topology.forecast import describe, forecasts
    from lexshard.cluster.topology.sizes import read_model_sizes

    engine, name = config.engine_configuration, arguments.gpu or "h200"
    sizes, context = read_model_sizes(config.model, engine.dtype), arguments.context or 2048
    most = engine.max_running
    found = forecasts(sizes, arguments.forecast, name, context=context, most=most)
    every = [asdict(each) for each in found]
    print(json.dumps(every, indent=2) if arguments.json else describe(sizes, found, name, context))
    return 0
