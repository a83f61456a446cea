"""The Ray Serve deployment: API processes, each the HTTP application beside the engine's client.

Serve's own queue, timeouts and autoscaling are left out of the way: admission is decided inside
the application, where errors have OpenAI's shape. There is no ``check_health`` of ours: Serve's
default watches this event loop, and the engine's health is told by ``/health`` and mended by the
client, so a restarting engine never takes the replica's open streams with it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import DeploymentUnavailableError

from lexshard.actors.faults import listen_for_faults
from lexshard.actors.machine import settle
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.process_tree import die_with_parent
from lexshard.cluster.roles.actor import own_node
from lexshard.cluster.roles.shared_object import stay_on_loopback
from lexshard.cluster.topology.reservation import NODE_LABEL, Reservation
from lexshard.serve_app.api_processes.direct_ingress import answer_here
from lexshard.serve_app.api_processes.seats import Seats, ServerRun
from lexshard.serve_app.app import create_app
from lexshard.serve_app.engine_client import EngineClient, EngineConnector
from lexshard.serve_app.observability.logs import log_to
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.server_state import Replica

APPLICATION_NAME, DEPLOYMENT_NAME = "lexshard", "server"
MAX_ONGOING_REQUESTS = 100_000


def start_engine(config: ServeConfig, reservation: Reservation | None = None) -> EngineClient:
    """The connector of a real server: the engine process that all its replicas share, where
    ``reservation`` says."""
    from lexshard.cluster.engine.ray_actor import RayEngines
    from lexshard.cluster.engine.supervisor import EngineSupervisor

    supervisor = EngineSupervisor(config.engine_configuration, RayEngines(reservation))
    supervisor.start()
    return supervisor


class ServerDeployment:
    """One replica, an API process: tokeniser, application, and a client of the engine. Without a
    ``run`` it is a server of its own, ``replica`` says which of several."""

    def __init__(
        self,
        config: ServeConfig,
        connect: EngineConnector,
        run: ServerRun | None = None,
        replica: Replica | None = None,
    ) -> None:
        die_with_parent()
        stay_on_loopback()
        # Ray Serve has put its own logger in the place of ``sys.stderr``, and at the level of
        # errors that one swallows every line.
        log_to(sys.__stderr__, config.log_format)
        listen_for_faults()
        self._client = connect(config)  # first: it takes longer, and in a process of its own
        self._tokenizer = ModelTokenizer.load(config.model, config.tool_format)
        seats, start_time = None, None
        if run is not None:
            seats = Seats(run.folder / "api-processes", config.api_processes)
            start_time = run.start_time
        self._built_app = create_app(
            config, self._client, self._tokenizer, seats, start_time, replica
        )
        settle()

    def __serve_build_asgi_app__(self) -> FastAPI:
        answer_here(self._built_app)
        return self._built_app

    async def information(self) -> dict[str, Any]:
        """What the engine decided, for the banner. Raises RuntimeError before it is ready."""
        return asdict(self._client.information)

    async def waits_for(self) -> tuple[str, bool] | None:
        """What keeps it from serving, and whether waiting makes sense; None: nothing does."""
        client = self._client
        if client.health_reason is None:
            return None
        return f"not ready: {client.health_reason}", client.failure is None

    async def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    async def shut_down(self, grace_seconds: float) -> None:
        """Takes no more requests; returns when every open stream has come to its end or has been
        told, after ``grace_seconds``, that it will not."""
        await self._client.stop(grace_seconds)


def application_of(
    kind: type[ServerDeployment], arguments: tuple[Any, ...], actor: dict[str, Any], **options: Any
) -> Application:
    """What Ray Serve runs: replicas that are made of ``arguments``, which are pickled, in an
    ``actor`` each."""
    deployment: Any = serve.deployment(
        serve.ingress()(kind),
        name=DEPLOYMENT_NAME,
        ray_actor_options={"num_cpus": 0, **actor},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.1,
        **options,
    )
    application: Application = deployment.bind(*arguments)
    return application


def bind(config: ServeConfig, connect: EngineConnector, run: ServerRun) -> Application:
    """The application Ray Serve runs; ``connect`` is pickled and called in every replica."""
    actor: dict[str, Any] = {}
    if config.address is not None:  # where the ingress is, and the engine's socket file
        actor["label_selector"] = {NODE_LABEL: own_node()}
    return application_of(
        ServerDeployment,
        (config, connect, run),
        actor,
        num_replicas=config.api_processes,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=2,  # `shut_down` has been called before
    )


def ask_all(handle: Any, method: str, *arguments: Any, seconds: float) -> list[Any]:
    """Calls a method of every replica at once; the answers of those that live and give one within
    ``seconds``."""
    try:
        response = handle.broadcast(method, *arguments)
        answers = response.results(timeout_s=seconds, return_exceptions=True)
    except (DeploymentUnavailableError, TimeoutError):
        return []
    return [answer for answer in answers if not isinstance(answer, Exception)]
