"""The two ways a server's processes are started, and what its roles are called in each."""

from __future__ import annotations

from typing import Literal

import pytest

Backend = Literal["process", "ray"]
Role = Literal["engine", "api", "ingress"]

PROCESS_AND_RAY = ("process", "ray")
# The same for a fixture or a test whose second run is for `make prove`.
PROCESS_AND_SLOW_RAY = ("process", pytest.param("ray", marks=pytest.mark.slow))

# A piece of the command line.
COMMANDS: dict[tuple[Backend, Role], str] = {
    ("process", "engine"): "lexshard.cluster.engine.main",
    ("process", "api"): "api_process",  # the real one, or that of scripted engines
    ("process", "ingress"): "bin/haproxy",
    ("ray", "engine"): "ray::EngineActor",
    ("ray", "api"): "ray::ServeReplica",
    ("ray", "ingress"): "bin/haproxy",
}
