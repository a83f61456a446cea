"""``lexshard cluster check``: does Ray take a file of `ray up` as it stands, every key of it?"""

from __future__ import annotations

import argparse

REFUSALS = (ValueError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("file", metavar="FILE", help="file of `ray up`")


def run(arguments: argparse.Namespace) -> int:
    """Check the file, asking no cloud; returns the exit status."""
    # Seconds, with Ray: a mistyped option should not wait for it.
    from lexshard.cluster.topology.ray_up import check_cluster_file

    print(f"{arguments.file} is valid: {check_cluster_file(arguments.file)}")
    return 0
