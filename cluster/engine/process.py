"""The engine in a process of its own: a Ray actor around ``actors.engine.engine.Engine``.

Beside a busy Python thread a 3 ms step became 13 ms, so the engine shares its interpreter with
nobody: HTTP, tokenisation and detokenisation live in the Serve replica.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.configuration import EngineConfiguration, EngineInformation
from cluster.engine.transport import Endpoints, EngineSide
from cluster.process_tree import die_with_parent


class EngineProcess:
    """Loads and warms the engine, then serves until stopped. One call at a time, in order."""

    def __init__(self, configuration: EngineConfiguration) -> None:
        die_with_parent()
        self._configuration = configuration
        self._engine: Any = None

    def load(self) -> EngineInformation:
        """Load the model and compile every kernel. Raises what the loader raises."""
        from transformers.utils import logging

        from actors.engine.engine import Engine  # torch and numba load here, not in the driver
        from cluster.samplers.start import start_sampler

        logging.disable_progress_bar()  # the log is no terminal
        self._engine = Engine(self._configuration, start_sampler)
        self._engine.warm_up()
        return self._engine.information

    def serve(self, endpoints: Endpoints) -> None:
        """Run the engine loop; returns when the client sends ``stop``."""
        from actors.engine.loop import run_engine

        side = EngineSide(endpoints)
        try:
            run_engine(self._engine, side, side.emit)
        finally:
            side.close()
            self._engine.close()


def start_engine_actor(configuration: EngineConfiguration) -> Any:
    """A new engine actor beside the caller: in its placement group where it has one."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
    group = get_current_placement_group()
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=True
        )
    return ray.remote(EngineProcess).options(**options).remote(configuration)
