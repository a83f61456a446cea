"""``lexshard topology plan``: what would go where, before anything starts."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING

from actors.configuration import NGRAM
from cluster.config import ServeConfig
from cluster.config_sources import ConfigError
from serve_app.commands.argument_types import at_least
from serve_app.commands.option_flags import add_option_flags, given_options
from serve_app.start.preflight import check_model_folder
from serve_app.start.readiness import StartupError

if TYPE_CHECKING:
    from actors.index.metadata import Metadata
    from cluster.topology.plan import TopologyPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the plan, then those of ``lexshard serve``, whose model and settings it is for."""
    parser.add_argument(
        "--nodes",
        nargs="+",
        metavar="NODE",
        help="such as '2x cpus=16,memory=64GiB,gpus=4,gpu_memory=80GiB' (default: this machine)",
    )
    for role in ("body", "shard", "sampler", "drafter"):
        default = "--sampler-threads" if role == "sampler" else "1"
        parser.add_argument(
            f"--cpus-per-{role}", type=_amount, metavar="N", help=f"default: {default}"
        )
    for role in ("body", "shard"):
        parser.add_argument(
            f"--gpus-per-{role}",
            type=_share,
            metavar="SHARE",
            help="of one GPU, 0 to 1 (default: 1 where nodes have GPUs)",
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


def _amount(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value:g} is not more than 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value:g} is not from 0 to 1: one device each")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit status."""
    try:
        config = given_options(arguments).config()
        check_model_folder(config.model)
        plan = _plan(arguments, config)
    except (ConfigError, StartupError, ValueError, OSError) as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    from cluster.topology.report import as_data, describe

    print(json.dumps(as_data(plan), indent=2) if arguments.json else describe(plan))
    return 0


def _plan(arguments: argparse.Namespace, config: ServeConfig) -> TopologyPlan:
    # Seconds: a mistyped folder should not wait for it.
    from cluster.topology.configured import configured_assignment, index_of
    from cluster.topology.model_sizes import read_model_sizes
    from cluster.topology.nodes import parse_nodes, this_machine
    from cluster.topology.plan import RoleResources, plan_topology

    nodes = parse_nodes(arguments.nodes) if arguments.nodes else (this_machine(),)
    engine = config.engine_configuration
    model = read_model_sizes(config.model, engine.dtype)
    found = index_of(engine)
    index: Metadata | None = None if found is None else found[1].metadata()
    assignment = configured_assignment(engine, model.vocabulary_size)
    gpu = float(config.device != "cpu" and any(node.gpus for node in nodes))
    threads = float(engine.sampler_threads)
    resources = RoleResources(
        body_cpus=_or(arguments.cpus_per_body, 1.0),
        shard_cpus=_or(arguments.cpus_per_shard, 1.0),
        sampler_cpus=_or(arguments.cpus_per_sampler, threads),
        drafter_cpus=_or(arguments.cpus_per_drafter, 1.0),
        body_gpus=_or(arguments.gpus_per_body, gpu),
        shard_gpus=_or(arguments.gpus_per_shard, gpu),
    )
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


def _or(given: float | None, default: float) -> float:
    return default if given is None else given
