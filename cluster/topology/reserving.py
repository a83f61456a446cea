"""What a server's options ask of nodes, and a reservation of it."""

from __future__ import annotations

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.place import own_node
from lexshard.cluster.topology.apart import processes_apart
from lexshard.cluster.topology.reservation import Reservation, cluster_nodes, reserve

# In a Ray of the server's own nobody else gives anything back; its first counts come late.
OWN_SECONDS = 5.0


def reserve_for(config: ServeConfig) -> Reservation:
    """A reservation for the engine of ``config``, on this node and others.

    Raises `cluster.topology.placement.PlacementError` where there is no room, and what
    `cluster.topology.configured.configured_processes` raises.
    """
    home = own_node()
    _, nodes = cluster_nodes(home)
    processes = processes_apart(config, nodes)
    seconds = OWN_SECONDS if config.address is None else float(config.placement_seconds)
    return reserve(processes, home=home, seconds=seconds)
