"""The engine in a process of its own: a Ray actor around ``actors.engine.engine.Engine``.

Beside a busy Python thread a 3 ms step became 13 ms, so the engine shares its interpreter with
nobody: HTTP, tokenisation and detokenisation live in the Serve replica.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.configuration import EngineConfiguration, EngineInformation
from cluster.engine.transport import Endpoints, EngineSide
from cluster.process_tree import die_with_parent

ENGINE_NAME, NAMESPACE = "engine", "lexshard"
_BESIDE = "beside"  # calls that are answered while ``serve`` runs


class EngineProcess:
    """Loads and warms the engine, then serves until stopped. One call at a time, in order.

    It outlives the replica that started it: loading a model takes longer than starting a replica.
    """

    def __init__(self, configuration: EngineConfiguration) -> None:
        die_with_parent()
        self._configuration = configuration
        self._engine: Any = None
        self._side: EngineSide | None = None

    def load(self) -> EngineInformation:
        """Load the model and compile every kernel. Raises what the loader raises."""
        from transformers.utils import logging

        from actors.engine.engine import Engine  # torch and numba load here, not in the driver
        from cluster.samplers.start import start_sampler

        logging.disable_progress_bar()  # the log is no terminal
        started = time.monotonic()

        def tell(phase: str) -> None:
            print(f"[{time.monotonic() - started:5.1f} s] engine: {phase}", flush=True)

        self._engine = Engine(self._configuration, start_sampler, tell=tell)
        self._engine.warm_up()
        return self._engine.information

    def serve(self, endpoints: Endpoints) -> None:
        """Run the engine loop; returns when the client sends ``stop``."""
        from actors.engine.loop import run_engine

        self._side = EngineSide(endpoints)
        try:
            run_engine(self._engine, self._side, self._side.emit)
        finally:
            self._side.close()
            self._engine.close()

    @ray.method(concurrency_group=_BESIDE)
    def attach(
        self, configuration: EngineConfiguration, endpoints: Endpoints
    ) -> EngineInformation | None:
        """Turn to a new client, forgetting what the one before has asked for.

        None where that is not possible: it does not serve yet, or serves something else.
        """
        if self._side is None or configuration != self._configuration:
            return None
        self._side.switch(endpoints)
        information: EngineInformation = self._engine.information
        return information

    def wait(self) -> None:
        """Returns when ``serve`` has: calls are taken in order."""


def running_engine_actor() -> Any:
    """The engine actor that another replica has left; None where there is none."""
    try:
        return ray.get_actor(ENGINE_NAME, NAMESPACE)
    except ValueError:
        return None


def start_engine_actor(configuration: EngineConfiguration) -> Any:
    """A new engine actor beside the caller: in its placement group where it has one.

    Raises:
        ValueError: the one before is still there.
    """
    options: dict[str, Any] = {
        "name": ENGINE_NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    group = get_current_placement_group()
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=True
        )
    remote = ray.remote(concurrency_groups={_BESIDE: 1})
    return remote(EngineProcess).options(**options).remote(configuration)
