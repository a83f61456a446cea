"""Replicas with an engine each, as Ray Serve starts them where it is told to by others.

Under `lexshard serve` the replicas of Serve are API processes before one engine. Here a replica is
a whole server: it has a placement group, its engine ends with it, it takes requests when that is
warm, and Serve may start, count and stop as many of them as it is told to. `lexshard serve` starts
them itself where it is told to have several.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve._private.common import RUNNING_REQUESTS_KEY
from ray.util.placement_group import get_current_placement_group

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.engine.supervisor import STARTS_WAITED_FOR
from lexshard.cluster.roles.shared_object import ask_shared, bind_shared
from lexshard.cluster.topology.processes import Processes
from lexshard.cluster.topology.reservation import (
    REPLICA_STRATEGY,
    replica_bundles,
    reservation_in,
)
from lexshard.serve_app.deployment import (
    DEPLOYMENT_NAME,
    ServerDeployment,
    application_of,
    ask_all,
)
from lexshard.serve_app.engine_client import EngineClient, EngineConnector
from lexshard.serve_app.observability.server_metrics import merged_metrics
from lexshard.serve_app.responses.store import ResponseStore
from lexshard.serve_app.server_state import Replica, ServerState

LOOK_SECONDS = 0.2
METRICS_SECONDS = 2.0  # Prometheus waits for 10
# At least so long for the streams of a replica that another one has taken the place of.
DRAIN_SECONDS = 120.0
FAREWELL_SECONDS = 5.0  # for the engine to end, after the streams have


def start_own_engine(config: ServeConfig, processes: Processes) -> EngineClient:
    """The connector of a replica in a placement group for ``processes``: an engine of its own."""
    from lexshard.cluster.engine.ray_actor import RayEngines
    from lexshard.cluster.engine.supervisor import EngineSupervisor

    group = get_current_placement_group()
    assert group is not None, "Ray Serve gives every replica the group that it was asked for"
    engines = RayEngines(reservation_in(group, processes), shared=False)
    supervisor = EngineSupervisor(config.engine_configuration, engines)
    supervisor.start()
    return supervisor


class ReplicaDeployment(ServerDeployment):
    """A whole server."""

    def __init__(self, config: ServeConfig, connect: EngineConnector, responses: Any) -> None:
        here = serve.get_replica_context()
        self._all = serve.get_deployment_handle(DEPLOYMENT_NAME, here.app_name)
        shared = partial(ask_shared, responses)
        own = Replica(here.replica_id.unique_id, self._all_metrics, shared)
        super().__init__(config, connect, replica=own)
        self._state: ServerState = self._built_app.state.server
        self._served = False
        self._restarts = 0  # of its engine, when that was ready last

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How many requests Serve is to think it has: most go past it
        (`serve_app.api_processes.direct_ingress`), and a choice is as much work as a request."""
        return {RUNNING_REQUESTS_KEY: self._state.admission.sequences}

    async def metrics(self) -> bytes:
        """What this replica tells of itself."""
        return self._state.metrics.text()

    async def _all_metrics(self) -> bytes:
        """What all tell; those that do not answer in time are left out."""
        ask = partial(ask_all, self._all, "metrics", seconds=METRICS_SECONDS)
        return merged_metrics(await asyncio.to_thread(ask))

    async def check_health(self) -> None:
        """Asked first before the replica takes requests: returns when its engine is warm.

        Raises:
            RuntimeError: the engine will never be ready, or was not in several starts after one
                another; Serve replaces the replica, on another node where this one has no GPU more.
        """
        client = self._client
        while not self._served and client.failure is None:
            self._served = client.ready
            await asyncio.sleep(LOOK_SECONDS)
        if client.failure is not None:
            raise RuntimeError(f"the engine could not start: {client.failure}")
        if client.ready:
            self._restarts = client.restarts
        elif client.restarts - self._restarts > STARTS_WAITED_FOR:
            raise RuntimeError(f"the engine ends again and again: {client.health_reason}")


def replica_processes(config: ServeConfig) -> Processes:
    """What one replica consists of. Needs no Ray, but the files of the model.

    Raises ValueError where no shards can be made of the model, OSError where it cannot be read.
    """
    # Seconds and hundreds of megabytes, which the replicas themselves do without.
    from lexshard.cluster.topology.configured import processes_on

    return processes_on(config)


def bind_replicas(
    config: ServeConfig,
    connect: EngineConnector | None = None,
    processes: Processes | None = None,
) -> Application:
    """The application of ``config``, of as many replicas as that says unless Serve is told
    otherwise; ``connect`` None gives each a real engine, in ``processes`` where they are known
    already. Raises what `replica_processes` raises.
    """
    options = _how_many(config)
    if connect is None:
        processes = replica_processes(config) if processes is None else processes
        connect = partial(start_own_engine, processes=processes)
        options["placement_group_bundles"] = replica_bundles(processes)
        options["placement_group_strategy"] = REPLICA_STRATEGY
    drain = max(DRAIN_SECONDS, config.shutdown_grace_seconds) + FAREWELL_SECONDS
    options["graceful_shutdown_timeout_s"] = drain
    # How many there are is no business of one: another number of them restarts none.
    own = config.model_copy(update={"replicas": 1, "max_replicas": None})
    responses = bind_shared("responses", partial(ResponseStore, None))
    return application_of(ReplicaDeployment, (own, connect, responses), {}, **options)


def _how_many(config: ServeConfig) -> dict[str, Any]:
    if not config.has_replicas:  # Serve's own configuration may say
        return {}
    if config.max_replicas is None:
        return {"num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.target_ongoing_requests,
    }
    return {"autoscaling_config": scaling}
