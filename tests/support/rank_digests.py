"""What engines whose bodies several ranks share tell their clients, as one digest."""

from __future__ import annotations

from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from lexshard.loadtest.token_digest import digest

# About five on a machine of its own; where others take its cores a process starts slowly.
BACK_SECONDS = 60.0


def told(engine: Engine, requests: list[Request]) -> str:
    """The digest of all that clients are told, to the last bit of every log-probability; ends the
    engine."""
    try:
        completions = []
        for first in range(0, len(requests), 100):
            completions += run_to_completion(engine, requests[first : first + 100])
        engine.check_idle()
        return digest(completions)
    finally:
        engine.close()
