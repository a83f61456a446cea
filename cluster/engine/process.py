"""The engine in a process of its own: a Ray actor around ``actors.engine.engine.Engine``.

Beside a busy Python thread a 3 ms step became 13 ms, so the engine shares its interpreter with
nobody: HTTP, tokenisation and detokenisation live in the Serve replica.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.configuration import EngineConfiguration, EngineInformation
from actors.faults import LoggedFault, listen_for_faults
from actors.role import RunningRole
from cluster.engine.transport import EngineSide
from cluster.place import own_node
from cluster.private_folder import PrivateFolder, remove_abandoned_folders
from cluster.process_tree import die_with_parent
from cluster.topology.reservation import Reservation

ENGINE_NAME, NAMESPACE = "engine", "lexshard"
# Calls that are answered while ``serve`` runs: one group waits for the model, one for nothing.
_BESIDE, _AT_ONCE = "beside", "at once"
# A server whose API processes were all killed has new ones in less.
DESERTED_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class EngineLocation:
    """What an engine is, and the socket file where it hears and speaks."""

    information: EngineInformation
    path: str


class Suitability(Enum):
    """Whether an engine is for the API process that has found it."""

    SUITABLE = "it serves this configuration"
    OCCUPIED = "it serves others, with another configuration"
    DESERTED = "it has another configuration, and serves nobody"


class EngineProcess:
    """Loads and warms an engine and serves it to every API process that connects.

    It outlives the replica that started it: loading a model takes longer than starting a replica.
    It ends when the last of those it served has asked for nothing more.
    """

    def __init__(
        self, configuration: EngineConfiguration, reservation: Reservation | None = None
    ) -> None:
        die_with_parent()
        logging.basicConfig()  # with a listener of its own a logger would no more write to stderr
        listen_for_faults()
        self._configuration = configuration
        self._reservation = reservation
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._begun = False
        self._side: EngineSide | None = None
        self._location: EngineLocation | None = None
        self._engine: Any = None

    def serve(self) -> None:
        """Load the model, compile every kernel, serve; every API process calls this, and the first
        call does it.

        Raises:
            Exception: what the loader raised, whoever asks.
        """
        if self._failure is not None:
            raise self._failure
        if self._begun:
            return
        self._begun = True
        try:
            engine = self._engine = self.load(self._configuration)
            remove_abandoned_folders()  # of engines that were killed
            folder = PrivateFolder()
            side = self._side = EngineSide(folder.path / "engine")
            self._location = EngineLocation(engine.information, str(folder.path / "engine"))
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._settled.set()
        try:
            self.run(engine, side)
        finally:
            side.close()
            engine.close()
            folder.remove()
        ray.actor.exit_actor()

    def load(self, configuration: EngineConfiguration) -> Any:
        """An engine that is warm."""
        from transformers.utils import logging

        from actors.engine.engine import Engine  # torch and numba load here, not in the driver
        from cluster.samplers.reserved import ReservedSamplers
        from cluster.samplers.start import start_sampler
        from cluster.shards.gang import RayShards

        logging.disable_progress_bar()  # the log is no terminal
        started = time.monotonic()

        def tell(phase: str) -> None:
            print(f"[{time.monotonic() - started:5.1f} s] engine: {phase}", flush=True)

        reservation = self._reservation
        shards = RayShards(configuration, reservation)
        samplers = start_sampler if reservation is None else ReservedSamplers(reservation)
        engine = Engine(configuration, samplers, shard_starter=shards, tell=tell)
        engine.warm_up()
        return engine

    def run(self, engine: Any, side: EngineSide) -> None:
        """Serve ``side`` until told to stop."""
        from actors.engine.loop import run_engine

        run_engine(engine, side, side.emit)

    @ray.method(concurrency_group=_AT_ONCE)
    def suits(self, configuration: EngineConfiguration) -> Suitability:
        """Whether this engine is for who asks."""
        if configuration == self._configuration:
            return Suitability.SUITABLE
        if self._side is None:  # whoever has it loaded has not had time to connect
            return Suitability.OCCUPIED if self._failure is None else Suitability.DESERTED
        deserted = self._side.deserted_seconds > DESERTED_SECONDS
        return Suitability.DESERTED if deserted else Suitability.OCCUPIED

    @ray.method(concurrency_group=_AT_ONCE)
    def roles(self) -> list[RunningRole]:
        """Who does what, and where; empty before there is an engine."""
        roles: list[RunningRole] = [] if self._engine is None else list(self._engine.roles())
        return [  # roles of this process and its children know of no node
            each if each.place.node else replace(each, place=each.place._replace(node=own_node()))
            for each in roles
        ]

    @ray.method(concurrency_group=_AT_ONCE)
    def faults(self) -> list[LoggedFault]:
        """What has gone wrong last in this process."""
        return listen_for_faults().told()

    @ray.method(concurrency_group=_BESIDE)
    def locate(self) -> EngineLocation | None:
        """Where to connect, as soon as there is an engine.

        Raises:
            Exception: what the loader raised.
        """
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._location


def find_engine_actor() -> Any:
    """The engine actor there is; None where there is none."""
    try:
        return ray.get_actor(ENGINE_NAME, NAMESPACE)
    except ValueError:
        return None


def start_engine_actor(
    configuration: EngineConfiguration,
    process: type[EngineProcess] = EngineProcess,
    arguments: tuple[Any, ...] = (),
    reservation: Reservation | None = None,
    *,
    shared: bool = True,
) -> Any:
    """The engine actor: the one there is, else a new one, in its slot of ``reservation``; without
    one beside the caller, in its placement group where it has one. One that is not ``shared`` is
    always new, and ends with the caller's process. ``arguments`` are those of a ``process`` that
    needs more."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
    if shared:
        options |= {
            "name": ENGINE_NAME,
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached",
        }
    group = get_current_placement_group()
    if reservation is not None:
        options |= reservation.options(reservation.engine)
        arguments = (*arguments, reservation)
    elif group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=True
        )
    remote = ray.remote(concurrency_groups={_BESIDE: 1, _AT_ONCE: 1})
    return remote(process).options(**options).remote(configuration, *arguments)
