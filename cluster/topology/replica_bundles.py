"""The placement group of one replica, which Ray Serve makes with it and removes with it."""

from __future__ import annotations

from ray.util.placement_group import PlacementGroup

from lexshard.cluster.topology.processes import Processes
from lexshard.cluster.topology.reservation import Reservation, Slot

STRATEGY = "PACK"  # on few nodes, where it can be


def replica_bundles(processes: Processes) -> list[dict[str, float]]:
    """One bundle for each process, the engine's first, where Serve puts the replica, too."""
    return [
        {name: amount for name, amount in (("CPU", role.cpus), ("GPU", role.gpus)) if amount > 0}
        for role in processes.all
    ]


def reservation_in(group: PlacementGroup, processes: Processes) -> Reservation:
    """The slots of ``processes`` in a ``group`` of their `replica_bundles`."""
    slots = [Slot(bundle, role.cpus, role.gpus) for bundle, role in enumerate(processes.all)]
    shards, spares = len(processes.shards), len(processes.spares)
    return Reservation(
        group,
        slots[0],
        tuple(slots[1 : 1 + shards]),
        tuple(slots[1 + shards : 1 + shards + spares]),
        tuple(slots[1 + shards + spares :]),
    )
