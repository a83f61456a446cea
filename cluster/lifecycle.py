"""Starting Ray on one machine, quietly and on the loopback interface alone."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from shutil import disk_usage

from lexshard.actors.body.families import text_description

SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "127.0.0.1"  # where a Ray of our own is
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # besides heads; messages travel elsewhere
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps the node's address at 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # Ray's own 15 lets any other work starve the engine
    # Ten times a second a node says what it has, to itself alone.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
}
# Where there are no agents to export metrics.
LEAN_ENVIRONMENT = {"RAY_enable_metrics_collection": "0"}
logger = logging.getLogger("lexshard.shards")


def prepare_environment(environment: dict[str, str] | None = None) -> None:
    """What a Ray that this process starts is to find there.

    Ray reads its environment when it is imported, so nothing may import it before this call.
    ``environment`` adds to the settings; what the user has set stays.
    """
    for name, value in {**ENVIRONMENT, **(environment or {})}.items():
        os.environ.setdefault(name, value)
    # A token of this start's own; Ray's default is one for every cluster of this user. A Ray that
    # has been imported already would not know it.
    if "ray" not in sys.modules and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def head_bytes(folder: str, count: int) -> int:
    """Of the output heads of so many copies of a model, by its description alone: a process that
    reads more of it takes seconds. 0 where that does not tell."""
    try:
        told = text_description(json.loads(Path(folder, "config.json").read_bytes()))
        half = "bfloat16" in (told.get("dtype"), told.get("torch_dtype"))
        return int(count * told["vocab_size"] * told["hidden_size"]) * (2 if half else 4)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0  # loading it says why


def store_bytes(heads: int) -> int:
    """Of an object store with room for ``heads``, too, as far as shared memory has it: Ray would
    keep all of a larger one on a disk."""
    if not (heads and SHARED_MEMORY.is_dir()):
        return OBJECT_STORE_BYTES
    wanted, room = OBJECT_STORE_BYTES + heads, disk_usage(SHARED_MEMORY).free
    if wanted > room:
        told = "/dev/shm has room for %.1f of %.1f GiB of heads: Ray keeps the rest on a disk"
        logger.warning(told, room / 2**30, wanted / 2**30)
    return max(OBJECT_STORE_BYTES, min(wanted, room))


def start_local_ray(
    environment: dict[str, str] | None = None,
    *,
    workers: int = 0,
    dashboard: bool = False,
    heads: int = 0,
) -> str | None:
    """A Ray node of this process's own; connects to none that is already running. See
    `prepare_environment`.

    ``workers`` processes are started before they are asked for; ``heads`` are the bytes of output
    heads whose shards are actors. Only with a ``dashboard``, whose address is returned, there are
    Ray's agents, too (`cluster.lean.node`).
    """
    prepare_environment(environment if dashboard else LEAN_ENVIRONMENT | (environment or {}))
    import ray

    with nullcontext() if dashboard else _without_agents(workers):
        context = ray.init(
            address="local",
            include_dashboard=dashboard,
            object_store_memory=store_bytes(heads),
            logging_level=logging.ERROR,
            log_to_driver=True,
        )
    return f"http://{context.dashboard_url}" if dashboard else None


def _without_agents(workers: int) -> AbstractContextManager[None]:
    """What has `ray.init` start no agents, where this release of Ray is made as that needs; another
    one starts all it has."""
    try:
        from lexshard.cluster.lean.node import lean_nodes
    except ImportError:
        return nullcontext()
    return lean_nodes(workers)
