"""The engine's loop tells what a step decided early, and keeps no GPU waiting for that."""

from __future__ import annotations

import pytest

from actors.configuration import EngineConfiguration
from actors.engine.engine import Engine
from actors.engine.loop import run_engine
from actors.engine.steps import Steps
from actors.messages import Commands, Request, SamplingParameters, StepOutput
from tests.support.paths import DEMO


@pytest.mark.parametrize("launches", [False, True])
def test_tokens_are_told_before_a_computation_and_beside_one_that_is_only_launched(
    launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes the next step while its host tells of the one before: nobody waits for
    that."""
    engine = Engine(EngineConfiguration(str(DEMO), dtype="float32", device="cpu", threads=1))
    monkeypatch.setattr(Steps, "launches", launches)
    happened: list[str] = []
    forward = engine.steps.forward

    def computed(*arguments: object) -> object:
        happened.append("forward")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.steps, "forward", computed)
    wanted = SamplingParameters(temperature=0.0, max_tokens=4, ignore_eos=True)
    commands = [Commands(submit=(Request("a", 0, (5, 6, 7), wanted),))]

    class Source:
        def receive(self, wait_seconds: float) -> Commands | None:
            if commands:
                return commands.pop()
            ended = happened.count("told") == 4
            return Commands(stop=True) if ended else None

    def emit(output: StepOutput) -> None:
        happened.extend("told" for event in output.events for _ in event.token_ids)

    run_engine(engine, Source(), emit, report_seconds=0.01)
    engine.check_idle()
    engine.close()
    if launches:
        expected = ["forward", *["forward", "told"] * 3, "told"]
    else:
        expected = ["forward", "told"] * 4
    assert happened == expected
