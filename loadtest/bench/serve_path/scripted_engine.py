"""An engine that computes nothing: every sequence gets a token per step, at a given rate."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lexshard.actors.configuration import EngineConfiguration, EngineInformation
from lexshard.actors.messages import Commands, EngineStatistics, Request, SequenceEvent, StepOutput
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.engine.process import EngineProcess
from lexshard.cluster.engine.transport import EngineSide

if TYPE_CHECKING:
    from lexshard.cluster.engine.supervisor import EngineSupervisor

# No engine of a real model makes more, and a loop that only sends would show no server's limits.
MOST_STEPS_PER_SECOND = 2000.0
REPORT_SECONDS = 0.5


@dataclass(slots=True)
class _Told:
    """A sequence and how many tokens its client has."""

    request: Request
    tokens: int = 0


class ScriptedEngine:
    """What ``EngineProcess`` needs to know of an engine."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.word = int(tokenizer(" the", add_special_tokens=False).input_ids[-1])
        vocabulary_size = int(AutoConfig.from_pretrained(model).vocab_size)
        self.information = EngineInformation(
            model=model,
            dtype="none",
            device="none",
            body="scripted",
            head="scripted",
            batch_invariant=True,
            threads=1,
            max_model_len=8192,
            vocabulary_size=vocabulary_size,
            eos_token_ids=(),
            default_sampling={},
            kv_blocks=0,
            kv_tokens=1 << 30,
            kv_bytes=0,
            parameters=0,
            process_id=os.getpid(),
        )

    def close(self) -> None:
        """There is nothing to close."""


class ScriptedEngineProcess(EngineProcess):
    """Emits ``tokens_per_second`` over all sequences, as long as that takes no more than
    ``MOST_STEPS_PER_SECOND``. A step that comes late is not made up for."""

    def __init__(self, configuration: EngineConfiguration, tokens_per_second: float) -> None:
        super().__init__(configuration)
        self._tokens_per_second = tokens_per_second

    def load(self, configuration: EngineConfiguration) -> ScriptedEngine:
        return ScriptedEngine(configuration.model)

    def run(self, engine: Any, side: EngineSide) -> None:
        running: dict[str, _Told] = {}
        due = reported = time.monotonic()
        while True:
            wait = max(0.0, due - time.monotonic()) if running else REPORT_SECONDS
            commands = side.receive(wait)
            if commands is not None:
                if commands.stop:
                    return
                _apply(commands, running)
                continue
            now = time.monotonic()
            if now - reported >= REPORT_SECONDS:
                side.emit(StepOutput((), EngineStatistics(running=len(running))))
                reported = now
            if not running or now < due:
                continue
            due = max(now, due + self._period(len(running)))
            side.emit(StepOutput(tuple(_step(running, engine.word))))

    def _period(self, running: int) -> float:
        """Seconds from one step to the next."""
        return max(running / self._tokens_per_second, 1 / MOST_STEPS_PER_SECOND)


def _apply(commands: Commands, running: dict[str, _Told]) -> None:
    for request_id in commands.cancel:
        running.pop(request_id, None)
    for request in commands.submit:
        running[request.request_id] = _Told(request)


def _step(running: dict[str, _Told], token_id: int) -> list[SequenceEvent]:
    events = []
    for request_id, told in list(running.items()):
        told.tokens += 1
        ends = told.tokens == told.request.parameters.max_tokens
        if ends:
            del running[request_id]
        reason = "length" if ends else None
        event = SequenceEvent(request_id, told.request.choice, (token_id,), finish_reason=reason)  # type: ignore[arg-type]
        events.append(event)
    return events


def connect_scripted(config: ServeConfig, tokens_per_second: float) -> EngineSupervisor:
    """The connector of a server on Ray whose engine is scripted."""
    from lexshard.cluster.engine.ray_actor import RayEngines
    from lexshard.cluster.engine.supervisor import EngineSupervisor

    make = partial(ScriptedEngineProcess, tokens_per_second=tokens_per_second)
    supervisor = EngineSupervisor(config.engine_configuration, RayEngines(make=make))
    supervisor.start()
    return supervisor
