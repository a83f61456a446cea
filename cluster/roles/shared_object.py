"""One object that all replicas of a Ray Serve application share: a deployment beside theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve._private import replica
from ray.serve.exceptions import RayServeException
from ray.util import get_node_ip_address

from lexshard.cluster.lifecycle import LOOPBACK
from lexshard.cluster.process_tree import die_with_parent

ANSWER_SECONDS = 5.0


def stay_on_loopback() -> None:
    """Keeps Serve's port for calls between deployments, which unpickles what it is sent, to this
    machine where all of Ray is: Serve opens it on every interface and has no setting for it."""
    if get_node_ip_address() != LOOPBACK:
        return
    open_port = replica.add_port_to_grpc_server

    def open_on_loopback(server: Any, address: str) -> Any:
        return open_port(server, f"{LOOPBACK}:{address.rpartition(':')[2]}")

    replica.add_port_to_grpc_server = open_on_loopback


class SharedObject:
    """What ``make`` makes, for as long as its process and the application live."""

    def __init__(self, make: Callable[[], Any]) -> None:
        die_with_parent()
        stay_on_loopback()
        self._shared = make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shared")

    async def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method in the one thread that there is for all."""
        work = getattr(self._shared, method)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def bind_shared(name: str, make: Callable[[], Any]) -> Application:
    """The deployment called ``name``; what is bound to it gets a handle instead."""
    deployment: Any = serve.deployment(
        SharedObject,
        name=name,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,
        logging_config={"enable_access_log": False},
    )
    application: Application = deployment.bind(make)
    return application


async def ask_shared(handle: Any, method: str, *arguments: Any) -> Any:
    """What a method of the object behind ``handle`` returns.

    Raises:
        ConnectionError: it does not answer.
        Exception: what the method raises.
    """
    try:
        return await asyncio.wait_for(handle.call.remote(method, *arguments), ANSWER_SECONDS)
    except RayTaskError as error:
        raise error.cause from error
    except (RayError, RayServeException, TimeoutError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
