"""``lexshard topology plan``: what would go where, before anything starts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from lexshard.actors.configuration import NGRAM
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import ConfigError
from lexshard.cluster.models.folders import with_model_folders
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.commands.argument_types import at_least
from lexshard.serve_app.commands.option_flags import add_option_flags, given_options
from lexshard.serve_app.start.preflight import check_model_folder
from lexshard.serve_app.start.readiness import StartupError

if TYPE_CHECKING:
    from lexshard.actors.index.metadata import Metadata
    from lexshard.cluster.topology.plan import TopologyPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the plan, then those of ``lexshard serve``, whose model and settings it is for."""
    parser.add_argument(
        "--nodes",
        nargs="+",
        metavar="NODE",
        help="such as '2x cpus=16,memory=64GiB,gpus=4,gpu_memory=80GiB' (default: this machine)",
    )
    parser.add_argument(
        "--nucleus",
        type=at_least(1),
        default=256,
        metavar="TOKENS",
        help="that a shard tells of a top-p row (default 256)",
    )
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    add_option_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit status."""
    try:
        config = with_model_folders(given_options(arguments).config(), tell, served=False)
        check_model_folder(config.model)
        plan = _plan(arguments, config)
    except (ConfigError, StartupError, ValueError, OSError) as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    from lexshard.cluster.topology.report import as_data, describe

    print(json.dumps(as_data(plan), indent=2) if arguments.json else describe(plan))
    return 0


def _plan(arguments: argparse.Namespace, config: ServeConfig) -> TopologyPlan:
    # Seconds: a mistyped folder should not wait for it.
    from lexshard.cluster.topology.configured import configured_assignment, index_of, role_resources
    from lexshard.cluster.topology.model_sizes import read_model_sizes
    from lexshard.cluster.topology.nodes import parse_nodes, this_machine
    from lexshard.cluster.topology.plan import plan_topology

    nodes = parse_nodes(arguments.nodes) if arguments.nodes else (this_machine(),)
    engine = config.engine_configuration
    model = read_model_sizes(config.model, engine.dtype)
    found = index_of(engine)
    index: Metadata | None = None if found is None else found[1].metadata()
    assignment = configured_assignment(engine, model.vocabulary_size)
    resources = role_resources(config, on_gpus=any(node.gpus for node in nodes))
    draft = None
    if config.draft is not None and config.draft != NGRAM:
        check_model_folder(config.draft)
        draft = read_model_sizes(config.draft, engine.dtype)
    return plan_topology(
        model,
        engine,
        assignment,
        nodes,
        resources,
        draft=draft,
        index=index,
        nucleus_tokens=arguments.nucleus,
    )
