"""A placement group in the Ray cluster there is, for every process of a gang."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lexshard.cluster.apart import answer_apart
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.roles.actor import own_node
from lexshard.cluster.topology.nodes import NodeResources
from lexshard.cluster.topology.placement import Placement, PlacementError, bundle_of, place
from lexshard.cluster.topology.processes import Processes

NODE_LABEL = "ray.io/node-id"
LOOK_SECONDS = 0.5
CONFIGURED = "lexshard.cluster.topology.configured"  # hundreds of megabytes with all it imports
# In a Ray of the server's own nothing is given back; its first counts come late.
OWN_SECONDS = 5.0
REPLICA_STRATEGY = "PACK"  # of Serve's groups: on few nodes, where it can be
# Ray does not say how much memory its GPUs have: what is too large fails when it is loaded.
_UNKNOWN_BYTES = 2**62


Slot = Mapping[str, Any]  # Ray's options for an actor: what it has of which bundle


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot for each process of `Processes`. ``group`` is there for as long as the program that
    reserved it is connected to Ray, and when it is removed what runs in it ends."""

    group: PlacementGroup
    engine: Slot
    ranks: tuple[Slot, ...]
    shards: tuple[Slot, ...]
    spares: tuple[Slot, ...]
    samplers: tuple[Slot, ...]

    def release(self) -> None:
        """Give everything back."""
        remove_placement_group(self.group)


def cluster_nodes(first: str) -> tuple[list[str], list[NodeResources]]:
    """The nodes that are alive, by identity and what they have left; ``first`` leads."""
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in free]
    alive.sort(key=lambda node: node["NodeID"] != first)
    nodes = []
    for node in alive:
        left = free[node["NodeID"]]
        nodes.append(
            NodeResources(
                name=f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
                cpus=left.get("CPU", 0.0),
                memory=int(left.get("memory", 0.0)),
                gpus=int(left.get("GPU", 0.0)),
                gpu_memory=_UNKNOWN_BYTES,
            )
        )
    return [node["NodeID"] for node in alive], nodes


def reserve(processes: Processes, *, home: str, seconds: float) -> Reservation:
    """Slots for ``processes``, the engine's on the node ``home``, as soon as they are free.

    Raises PlacementError where they are not within ``seconds``: what finds no room, what nodes have
    left and what to do.
    """
    deadline = time.monotonic() + seconds
    while True:
        identities, nodes = cluster_nodes(home)
        try:
            placement = place(processes.all, nodes, home=True)  # beside the API processes
            break
        except PlacementError as error:
            if time.monotonic() > deadline:
                raise PlacementError(f"{error} ({_waited(seconds)}{_offers(nodes)})") from error
        time.sleep(LOOK_SECONDS)
    bundles = bundles_of(placement)
    group = placement_group(
        bundles,
        strategy=placement.strategy,
        bundle_label_selector=[{NODE_LABEL: identities[0]}] + [{}] * (len(bundles) - 1),
    )
    if not group.wait(max(deadline - time.monotonic(), 10.0)):
        remove_placement_group(group)
        raise PlacementError(
            f"cannot place a gang that needs {_words(bundles)} on nodes of their own: others have "
            f"taken what was free; try again, or add nodes ({_offers(cluster_nodes(home)[1])})"
        )
    numbers = [placement.nodes.index(each.node) for each in placement.placed]
    return _reservation(group, processes, numbers)


def bundles_of(placement: Placement) -> list[dict[str, float]]:
    """What Ray is asked for: of several GPUs it gives whole ones only."""
    bundles = []
    for node, bundle in zip(placement.nodes, placement.bundles, strict=True):
        gpus = {each.gpu for each in placement.placed if each.node == node} - {None}
        bundles.append(bundle | {"GPU": float(len(gpus))} if len(gpus) > 1 else dict(bundle))
    return bundles


def _reservation(
    group: PlacementGroup, processes: Processes, bundles: Iterable[int]
) -> Reservation:
    """A slot for each of ``processes`` in its one of ``bundles``."""
    slots: Iterator[Slot] = (
        {
            "num_cpus": role.cpus,
            "num_gpus": role.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }
        for bundle, role in zip(bundles, processes.all, strict=True)
    )
    return Reservation(
        group,
        next(slots),
        tuple(islice(slots, len(processes.ranks))),
        tuple(islice(slots, len(processes.shards))),
        tuple(islice(slots, len(processes.spares))),
        tuple(slots),
    )


def _waited(seconds: float) -> str:
    return f"after {seconds:g} s; " if seconds else ""


def _offers(nodes: Sequence[NodeResources]) -> str:
    return "free are " + ", ".join(
        f"{node.cpus:g} CPU"
        + (f" and {node.gpus} GPU" if node.gpus else "")
        + f" and {node.memory / 2**30:.1f} GiB on {node.name}"
        for node in nodes
    )


def _words(bundles: Sequence[dict[str, float]]) -> str:
    return " and ".join(
        " with ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles
    )


def replica_bundles(processes: Processes) -> list[dict[str, float]]:
    """One bundle for each process, the engine's first, where Serve puts the replica, too."""
    return [bundle_of([role]) for role in processes.all]


def reservation_in(group: PlacementGroup, processes: Processes) -> Reservation:
    """The slots of ``processes`` in a ``group`` of their `replica_bundles`."""
    return _reservation(group, processes, range(len(processes.all)))


def reserve_for(config: ServeConfig) -> Reservation:
    """A reservation for the engine of ``config``, on this node and others.

    Raises PlacementError where there is no room, and what
    `cluster.topology.configured.configured_processes` raises.
    """
    home = own_node()
    _, nodes = cluster_nodes(home)
    processes = answer_apart(CONFIGURED, "processes_on", config, tuple(nodes))
    seconds = OWN_SECONDS if config.address is None else float(config.placement_seconds)
    return reserve(processes, home=home, seconds=seconds)
