"""Engines of the demo model."""

from __future__ import annotations

from typing import Any

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.engine.engine import Engine
from lexshard.cluster.samplers.start import start_sampler
from tests.support.paths import DEMO


def demo_engine(drafter: Drafter | None = None, **settings: Any) -> Engine:
    """In float32, with one thread, on the CPU, where ``settings`` say nothing else."""
    settings = {"dtype": "float32", "device": "cpu", "threads": 1, **settings}
    return Engine(EngineConfiguration(str(DEMO), **settings), start_sampler, drafter)
