"""Starting Ray on one machine, quietly and on the loopback interface alone."""

from __future__ import annotations

import logging
import os
from typing import Any

# Read by Ray when it is imported and inherited by every process it starts: the node's address
# stays 127.0.0.1, and nothing is reported to anybody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import ray  # noqa: E402  (after the settings it reads)


def start_local_ray(**settings: Any) -> None:
    """A Ray node of this process's own; connects to none that is already running."""
    ray.init(
        address="local",
        include_dashboard=False,
        configure_logging=True,
        logging_level=logging.WARNING,
        log_to_driver=True,
        namespace="lexshard",
        _node_ip_address="127.0.0.1",
        **settings,
    )
