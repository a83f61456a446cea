"""``lexshard cluster check``: is a file of `ray up` what it means, with room for a gang?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lexshard.serve_app.cli import parser_of
from lexshard.serve_app.commands import topology_plan

if TYPE_CHECKING:
    from lexshard.cluster.topology.ray_up import NodeGroup

REFUSALS = topology_plan.REFUSALS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("file", metavar="FILE", help="file of `ray up`")
    parser.add_argument(
        "--config", metavar="FILE", help="of `lexshard serve`: plan its gang on these nodes"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the file, asking no cloud; returns the exit status."""
    # Seconds, with Ray: a mistyped option should not wait for it.
    from lexshard.cluster.topology.ray_up import advice, node_groups, read_cluster_file

    file = read_cluster_file(arguments.file)
    groups = node_groups(file)
    print(f"{arguments.file} is valid: {file.provider}, {', '.join(map(_told, groups))}")
    for sentence in advice(file):
        print(f"  note: {sentence}")
    if arguments.config is None:
        return 0
    # Nothing is placed where there is no CPU.
    nodes = [group.specification for group in groups if group.cpus and group.most]
    if not nodes:
        raise ValueError(f"no node of {arguments.file} has a CPU")
    planner = parser_of(("topology", "plan"))
    return topology_plan.run(planner.parse_args(["--config", arguments.config, "--nodes", *nodes]))


def _told(group: NodeGroup) -> str:
    count = f"{group.least}" if group.least == group.most else f"{group.least} to {group.most}"
    gpus = f", {group.gpus} GPUs" if group.gpus else ""
    return f"{count} {group.name} ({group.cpus} CPUs{gpus})"
