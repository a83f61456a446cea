"""A Ray node with nothing beside it that a server of one machine does not need.

Ray starts a dashboard's server, two agents and an autoscaler's monitor with every head node: 400 MB
and seconds of two cores, for what is not used here. The server and the monitor are left out; the
agents the node insists on, so others stand in for them. What they do is lost with them: the
dashboard, Ray's own metrics, and runtime environments, of which there are none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ray._private import node, services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

from lexshard.cluster.lean import agent_stand_in

# The node waits until its agents have said where they listen; -1: nowhere, so no client tries.
_PORTS = {
    METRICS_AGENT_PORT_NAME: -1,
    METRICS_EXPORT_PORT_NAME: -1,
    DASHBOARD_AGENT_LISTEN_PORT_NAME: -1,
    RUNTIME_ENV_AGENT_PORT_NAME: 1,  # it must be one; it is asked for environments alone
}
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_WORKERS = "--num_prestart_python_workers"


class LeanNode(Node):
    """A head node; ``workers`` processes are started before they are asked for."""

    def __init__(self, ray_params: RayParams, *, workers: int, **options: Any) -> None:
        self._workers = workers
        ray_params.no_monitor = True
        super().__init__(ray_params, **options)

    def start_api_server(self, **_: Any) -> None:
        """There is none."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        for name, port in _PORTS.items():
            persist_port(self.get_session_dir_path(), self.node_id, name, port)
        start = services.start_ray_process

        def start_without_agents(command: Sequence[str], *more: Any, **others: Any) -> Any:
            return start([self._replaced(each) for each in command], *more, **others)

        services.start_ray_process = start_without_agents
        try:
            super().start_raylet(*arguments, **options)
        finally:
            services.start_ray_process = start

    def _replaced(self, argument: str) -> str:
        name = argument.partition("=")[0]
        if name in _AGENTS:
            stand_in = [sys.executable, "-I", "-S", agent_stand_in.__file__]
            return f"{name}={subprocess.list2cmdline(stand_in)}"
        return f"{name}={self._workers}" if name == _WORKERS else argument


@contextmanager
def lean_nodes(workers: int) -> Iterator[None]:
    """Inside the ``with``, the node that `ray.init` starts is a `LeanNode`."""
    node.Node = partial(LeanNode, workers=workers)
    try:
        yield
    finally:
        node.Node = Node
