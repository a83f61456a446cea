"""A whole server: Ray, of its own on loopback or one that is joined, Serve, the replicas and their
engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lexshard.cluster.apart import answer_apart
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.ingress import DRAINING_SECONDS, haproxy_binary, ingress_environment
from lexshard.cluster.joining import join_ray
from lexshard.cluster.leaving import end_serve, leave_ray
from lexshard.cluster.lifecycle import LOOPBACK, head_bytes, start_local_ray
from lexshard.cluster.private_folder import PrivateFolder, remove_abandoned_folders
from lexshard.serve_app.api_processes.seats import ServerRun
from lexshard.serve_app.engine_client import EngineConnector
from lexshard.serve_app.start.preflight import certificate_with_key
from lexshard.serve_app.start.readiness import StartupError

if TYPE_CHECKING:
    from lexshard.cluster.topology.processes import Processes
    from lexshard.cluster.topology.reservation import Reservation

OPEN_CLUSTER = (
    "WARNING: the Ray cluster at {} asks for no token: any client of its ports can run code on "
    "its nodes; start it with RAY_AUTH_MODE=token"
)
SERVES_PROCESSES = 2  # its controller, and what keeps HAProxy
SERVE_ENVIRONMENT = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Streams pass through one event loop less: a fifth less time at 32 streams.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # What the controller looks at seldom changes; less often still, it would notice a loss late.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
        "lexshard.serve_app.middleware.ingress_middlewares"
    ),
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "lexshard.cluster.lean.serve_controller.prepare",
}


def _own_certificate(config: ServeConfig, binary: str | None) -> dict[str, str]:
    """For Serve's own proxy, where that one stands in front."""
    if binary is not None or config.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile or config.ssl_certfile,
    }


def _reserved(config: ServeConfig) -> Reservation:
    from lexshard.cluster.topology.reservation import (
        reserve_for,  # with Ray, which is ready only now
    )

    try:
        return reserve_for(config)
    except ValueError as error:  # no room, or shards that cannot be made
        raise StartupError(str(error)) from error


def _started_engine(
    config: ServeConfig, ends: ExitStack, tell: Callable[[str], None]
) -> EngineConnector:
    """Starts the engine, which takes longer than Serve and the API processes that are to find it;
    how they do."""
    from lexshard.cluster.engine.ray_actor import RayEngines

    reservation = None
    if config.reserve or config.address is not None:
        tell("reserving CPUs and GPUs")
        reservation = _reserved(config)
        ends.callback(reservation.release)
    tell("starting the engine")
    RayEngines(reservation).start(config.engine_configuration).begin()
    from lexshard.serve_app.deployment import start_engine  # with Serve, which takes a second

    return partial(start_engine, reservation=reservation)


def _bodies_on(config: ServeConfig) -> str:
    """See `join_ray`: ranks may be on any node, an engine alone is on the head."""
    engine = config.engine_configuration
    apart = engine.tensor_parallel is not None and engine.dtype != "float32"
    return engine.device if apart else "cuda"


def _check_room(config: ServeConfig, processes: Processes, tell: Callable[[str], None]) -> None:
    """Serve would wait for it for ever."""
    import ray

    has = ray.cluster_resources()
    for name, each in (
        ("CPU", sum(role.cpus for role in processes.all)),
        ("GPU", sum(role.gpus for role in processes.all)),
    ):
        room = int(has.get(name, 0) / each) if each else config.replicas
        if room < config.replicas:
            raise StartupError(
                f"no room for {config.replicas} replicas of {each:g} {name}s each: there are "
                f"{has.get(name, 0):g}; start fewer, or give each less (--threads, "
                "--cpus-per-body, --gpus-per-body)"
            )
        if config.max_replicas is not None and each and room < config.max_replicas:
            tell(f"room for {room} replicas, not for {config.max_replicas}, by {name}s")


def _end_serve(application: str, tell: Callable[[str], None]) -> None:
    others = end_serve(application)
    if others:
        tell(
            f"Ray Serve stays for others' applications in it ({', '.join(others)}), its ingress as "
            "it is: deploy them to a Ray Serve of their own"
        )


@contextmanager
def running_server(
    config: ServeConfig,
    connect: EngineConnector | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Any]:
    """Serves inside the ``with``; yields Serve's handle to the replicas. A cluster that was joined
    is left as it was; a Ray of its own, with all that is in it, ends with this process.

    ``connect`` None starts a real engine; ``tell`` hears what is being done. Ray reads its
    environment when it is imported, so nothing before this may import it.

    Raises:
        RuntimeError: a replica could not be made (its reason is in the message).
        StartupError: there is no room for its processes.
        JoinError: it cannot join the cluster it was told to.
    """
    remove_abandoned_folders()
    folder = PrivateFolder()
    binary = haproxy_binary()
    environment, host = SERVE_ENVIRONMENT, config.host
    if binary is None:
        tell("no HAProxy here: Serve's own proxy, slower, stands in front")
    else:
        environment = SERVE_ENVIRONMENT | ingress_environment(
            binary,
            folder.path,
            config.host,
            config.port,
            max(config.api_processes, config.replicas, config.max_replicas or 1),
            certificate_with_key(config),
            config.routing if config.has_replicas else "load",
            DRAINING_SECONDS if config.has_replicas else 0,
        )
        host = LOOPBACK  # of the replicas: only HAProxy, on their node, is to reach them
    with ExitStack() as ends:
        ends.callback(folder.remove)
        if config.address is None:
            tell("starting Ray")
            given = connect is None and "--shards" in config.needs_ray
            copies = max(config.replicas, config.max_replicas or 1)
            dashboard = start_local_ray(
                environment,
                workers=config.api_processes + SERVES_PROCESSES + 1,
                dashboard=config.dashboard,
                heads=head_bytes(config.model, copies) if given else 0,
            )
            if dashboard is not None:
                tell(f"Ray's dashboard is at {dashboard}")
        else:
            tell(f"joining the Ray cluster at {config.address}")
            if not join_ray(config.address, environment, _bodies_on(config)):
                tell(OPEN_CLUSTER.format(config.address))
            ends.callback(leave_ray)
        if connect is None and not config.has_replicas:
            connect = _started_engine(config, ends, tell)
        from ray import serve

        from lexshard.serve_app.deployment import APPLICATION_NAME, bind

        quiet = {"log_level": "ERROR", "enable_access_log": False}
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        if config.address is not None:
            # Before all others, so that open streams are told before the proxy goes.
            ends.callback(_end_serve, APPLICATION_NAME, tell)
        tell("starting Ray Serve")
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": config.port, **_own_certificate(config, binary)},
            logging_config=quiet,
        )
        if config.has_replicas:
            processes = None
            if connect is None:
                try:
                    processes = answer_apart(
                        "lexshard.cluster.topology.configured", "processes_on", config
                    )
                except (ValueError, OSError) as error:  # of the model, or of how it is divided
                    raise StartupError(str(error)) from error
                _check_room(config, processes, tell)
            from lexshard.serve_app.replica import bind_replicas

            tell(f"starting {config.replicas} replicas, with an engine each")
            application = bind_replicas(config, connect, processes)
        else:
            tell("starting the application")
            run = ServerRun(folder.path, int(time.time()))
            assert connect is not None, "it was given, or an engine was started"
            application = bind(config, connect, run)
        yield serve.run(application, name=APPLICATION_NAME, route_prefix="/", logging_config=quiet)
