"""A role as a Ray actor: where it is, what it answers, that it has gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from lexshard.actors.role import Place, here
from lexshard.cluster.link import PeerLostError


def own_node() -> str:
    """The Ray node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def place_in_cluster() -> Place:
    """This process, with its Ray node."""
    return here()._replace(node=own_node())


def start_actor(role: type, *arguments: Any, beside: Sequence[str] = (), **options: Any) -> Any:
    """Ray's handle of an actor, which may not have begun yet. ``options`` are Ray's: where it runs
    and what it reserves. ``beside`` are groups of methods that are answered while others run.

    It is never started anew by Ray: its owner, which knows what it must be told again, does.
    """
    chosen = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, **options}
    groups: Any = {"concurrency_groups": dict.fromkeys(beside, 1)} if beside else {}
    remote = ray.remote(**groups) if groups else ray.remote
    return remote(role).options(**chosen).remote(*arguments)


def answer_of(reference: Any, seconds: float | None = None) -> Any:
    """What an actor was asked for; waits for it, None: as long as it takes.

    Raises what the actor raised, `PeerLostError` where it has died, and TimeoutError.
    """
    try:
        return ray.get(reference, timeout=seconds)
    except ray.exceptions.RayActorError as error:
        raise PeerLostError(f"the actor has died: {error}") from error
