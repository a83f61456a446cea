"""Where a process is in a Ray cluster."""

from __future__ import annotations

import ray

from lexshard.actors.role import Place, here


def own_node() -> str:
    """The Ray node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def place_in_cluster() -> Place:
    """This process, with its Ray node."""
    return here()._replace(node=own_node())
