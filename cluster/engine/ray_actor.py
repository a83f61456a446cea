"""The engine as a Ray actor, beside the shards and samplers of its gang."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.faults import LoggedFault
from lexshard.actors.role import RunningRole
from lexshard.cluster.engine.handle import EngineLocation, EngineRaisedError, Suitability
from lexshard.cluster.engine.process import EngineProcess, Tell
from lexshard.cluster.link import PeerLostError
from lexshard.cluster.roles.actor import own_node, start_actor
from lexshard.cluster.topology.reservation import Reservation

ENGINE_NAME, NAMESPACE = "engine", "lexshard"
# Calls that are answered while ``serve`` runs: one group waits for the model, one for nothing.
_BESIDE, _AT_ONCE = "beside", "at once"
# A server whose API processes were all killed has new ones in less.
DESERTED_SECONDS = 20.0


class EngineActor:
    """What Ray runs: a `ClusteredEngine`, and answers while it serves."""

    def __init__(self, configuration: EngineConfiguration, reservation: Reservation | None) -> None:
        self._configuration = configuration
        self._process = ClusteredEngine(configuration, reservation)

    def serve(self) -> None:
        """See `EngineProcess.serve`; every API process calls this."""
        if self._process.serve():
            ray.actor.exit_actor()

    def begin(self) -> None:
        """Serves for callers of `serve`, which tells them of what goes wrong."""
        with suppress(Exception):
            self.serve()

    @ray.method(concurrency_group=_AT_ONCE)
    def suits(self, configuration: EngineConfiguration) -> Suitability:
        """Whether this engine is for the caller."""
        if configuration == self._configuration:
            return Suitability.SUITABLE
        deserted = self._process.deserted_seconds
        if deserted is None:  # its first client has not had time to connect
            return Suitability.OCCUPIED
        return Suitability.DESERTED if deserted > DESERTED_SECONDS else Suitability.OCCUPIED

    @ray.method(concurrency_group=_AT_ONCE)
    def roles(self) -> list[RunningRole]:
        """See `EngineProcess.roles`."""
        return [  # roles of this process and its children know of no node
            each if each.place.node else replace(each, place=each.place._replace(node=own_node()))
            for each in self._process.roles()
        ]

    @ray.method(concurrency_group=_AT_ONCE)
    def faults(self) -> list[LoggedFault]:
        """See `EngineProcess.faults`."""
        return self._process.faults()

    @ray.method(concurrency_group=_BESIDE)
    def locate(self) -> EngineLocation | None:
        """See `EngineProcess.locate`."""
        return self._process.locate()


class ClusteredEngine(EngineProcess):
    """An engine whose ranks, shards and samplers are Ray actors where its configuration says so, in
    their slots of ``reservation`` where there is one."""

    def __init__(self, configuration: EngineConfiguration, reservation: Reservation | None) -> None:
        super().__init__(configuration)
        self._reservation = reservation

    def make(self, configuration: EngineConfiguration, tell: Tell) -> Any:
        from lexshard.actors.engine.engine import Engine
        from lexshard.cluster.ranks.actors import RayRanks
        from lexshard.cluster.ranks.shards import RankShards
        from lexshard.cluster.samplers.start import SamplerStarter
        from lexshard.cluster.shards.gang import RayShards

        reservation = self._reservation
        at_ranks = configuration.shards_at_ranks
        shards = RankShards(configuration) if at_ranks else RayShards(configuration, reservation)
        samplers = SamplerStarter(reservation)
        ranks = RayRanks(float(configuration.shard_seconds), reservation)
        return Engine(configuration, samplers, shard_starter=shards, tell=tell, start_ranks=ranks)


class RayEngine:
    """An `EngineHandle` on an `EngineActor`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self) -> None:
        """Has it load its model before a client connects."""
        self._actor.begin.remote()

    async def suits(self, configuration: EngineConfiguration) -> Suitability:
        return cast(Suitability, await _answer(self._actor.suits.remote(configuration)))

    async def located(self) -> EngineLocation | None:
        return cast(EngineLocation | None, await _answer(self._actor.locate.remote()))

    async def ended(self) -> None:
        await _answer(self._actor.serve.remote())

    async def roles(self) -> Sequence[RunningRole]:
        return cast(Sequence[RunningRole], await _answer(self._actor.roles.remote()))

    async def faults(self) -> Sequence[LoggedFault]:
        return cast(Sequence[LoggedFault], await _answer(self._actor.faults.remote()))

    def kill(self) -> None:
        ray.kill(self._actor)


class RayEngines:
    """An `EngineHost`: engines that are started are in their slot of ``reservation``; without one
    beside the caller, in its placement group where it has one. Those that are not ``shared`` are
    always new, and end with the caller's process."""

    def __init__(self, reservation: Reservation | None = None, *, shared: bool = True) -> None:
        self._reservation = reservation
        self._shared = shared

    def find(self) -> RayEngine | None:
        if not self._shared:
            return None
        try:
            return RayEngine(ray.get_actor(ENGINE_NAME, NAMESPACE))
        except ValueError:
            return None

    def start(self, configuration: EngineConfiguration) -> RayEngine:
        options: dict[str, Any] = {}
        if self._shared:
            options = {
                "name": ENGINE_NAME,
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
            }
        group = get_current_placement_group()
        if self._reservation is not None:
            options |= self._reservation.engine
        elif group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_capture_child_tasks=True
            )
        beside = (_BESIDE, _AT_ONCE)
        return RayEngine(
            start_actor(EngineActor, configuration, self._reservation, beside=beside, **options)
        )


async def _answer(reference: Any) -> Any:
    """Raises:
    EngineRaisedError, PeerLostError: see `EngineHandle`.
    """
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        raise EngineRaisedError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise PeerLostError(str(error).splitlines()[0]) from error
