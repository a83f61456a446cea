"""Replicas with an engine each, as Ray Serve starts them where it is told to by others.

Under `lexshard serve` the replicas of Serve are API processes before one engine. Here a replica is
a whole server: it has a placement group, its engine ends with it, it takes requests when that is
warm, and Serve may start, count and stop as many of them as it is told to.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application
from ray.util.placement_group import get_current_placement_group

from cluster.config import ServeConfig
from cluster.topology.configured import configured_processes, role_resources
from cluster.topology.nodes import this_machine
from cluster.topology.processes import Processes
from cluster.topology.replica_bundles import STRATEGY, replica_bundles, reservation_in
from serve_app.deployment import DEPLOYMENT_NAME, MAX_ONGOING_REQUESTS, ServerDeployment
from serve_app.engine_client import EngineClient

LOOK_SECONDS = 0.2
FAREWELL_SECONDS = 5.0  # for the engine to end, after the streams have


def start_own_engine(config: ServeConfig, processes: Processes) -> EngineClient:
    """The connector of a replica in a placement group for ``processes``: an engine of its own."""
    from cluster.engine.process import start_engine_actor
    from cluster.engine.supervisor import EngineSupervisor

    group = get_current_placement_group()
    assert group is not None, "Ray Serve gives every replica the group that it was asked for"
    start = partial(start_engine_actor, reservation=reservation_in(group, processes), shared=False)
    supervisor = EngineSupervisor(config.engine_configuration, start, find_actor=lambda: None)
    supervisor.start()
    return supervisor


class ReplicaDeployment(ServerDeployment):
    """A whole server."""

    def __init__(self, config: ServeConfig, processes: Processes) -> None:
        super().__init__(config, partial(start_own_engine, processes=processes))
        self._served = False

    async def check_health(self) -> None:
        """Asked first before the replica takes requests: returns when its engine is warm.

        Raises:
            RuntimeError: the engine will never be ready; Serve replaces the replica.
        """
        client = self._client
        while not self._served and client.failure is None:
            self._served = client.ready
            await asyncio.sleep(LOOK_SECONDS)
        if client.failure is not None:
            raise RuntimeError(f"the engine could not start: {client.failure}")


def bind_replicas(config: ServeConfig) -> Application:
    """The application of ``config``, of one replica unless Serve is told otherwise. Needs no Ray,
    but the files of the model.

    Raises ValueError where no shards can be made of the model, OSError where it cannot be read.
    """
    here = this_machine()
    processes = configured_processes(
        config.engine_configuration,
        role_resources(config, on_gpus=config.device == "cuda" or here.gpus > 0),
        [here],
    )
    deployment: Any = serve.deployment(
        serve.ingress()(ReplicaDeployment),
        name=DEPLOYMENT_NAME,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=replica_bundles(processes),
        placement_group_strategy=STRATEGY,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.shutdown_grace_seconds + FAREWELL_SECONDS,
    )
    application: Application = deployment.bind(config, processes)
    return application
