"""The engine's loop tells what a step decided early, and keeps no GPU waiting for that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from lexshard.actors.engine.loop import COMMAND_SECONDS, run_engine
from lexshard.actors.engine.steps import Steps
from lexshard.actors.kv_cache import BlockPool
from lexshard.actors.messages import (
    Commands,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from tests.support.demo_engine import demo_engine
from tests.support.stepped_engines import Source


@pytest.mark.parametrize("launches", [False, True])
def test_tokens_are_told_before_the_next_step_and_beside_one_that_is_only_launched(
    launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes the next step while its host tells of the one before; elsewhere no
    client waits for what the next step is planned with, guesses for example."""
    engine = demo_engine(steps_at_once=1)
    monkeypatch.setattr(Steps, "launches", launches)
    happened: list[str] = []
    plan, forward = engine.steps.plan, engine.steps.forward

    def planned() -> object:
        found = plan()
        happened.extend(["plan"] if found else [])
        return found

    def computed(*arguments: object) -> object:
        happened.append("forward")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.steps, "plan", planned)
    monkeypatch.setattr(engine.steps, "forward", computed)
    wanted = SamplingParameters(temperature=0.0, max_tokens=4, ignore_eos=True)

    def commands() -> Iterator[Commands | None]:
        yield Commands(submit=(Request("a", 0, (5, 6, 7), wanted),))
        while happened.count("told") != 4:
            yield None

    how_it_was: list[int] = []

    def emit(output: StepOutput) -> None:
        happened.extend("told" for event in output.events for _ in event.token_ids)
        if output.statistics and any(event.finish_reason for event in output.events):
            how_it_was.append(output.statistics.running)

    run_engine(engine, Source(commands()), emit, report_seconds=0.01)
    engine.check_idle()
    engine.close()
    if launches:
        expected = ["plan", "forward", *["plan", "forward", "told"] * 3, "told"]
    else:
        expected = ["plan", "forward", "told"] * 4
    assert how_it_was == [0]  # sequences run when the last token is told
    assert happened == expected


def test_what_leaked_is_found_at_rest_without_a_look_at_every_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two requests of a client that takes turns, too."""
    engine = demo_engine()
    monkeypatch.setattr(BlockPool, "check", lambda pool: pytest.fail("it looks at every block"))
    waiting = [None, None, asked("a", 1), *[None] * 20, asked("b", 1), *[None] * 20]
    run_engine(engine, Source(waiting), lambda output: None, report_seconds=0.0)
    engine._scheduler.pool.allocate()
    with pytest.raises(RuntimeError, match="1 KV blocks"):
        run_engine(engine, Source([None]), lambda output: None, report_seconds=0.0)
    engine.close()


def asked(name: str, choices: int, **changes: Any) -> Commands:
    parameters = SamplingParameters(**{"max_tokens": 3, "ignore_eos": True, **changes})
    return Commands(submit=tuple(Request(name, n, (5, 6, 7), parameters) for n in range(choices)))


def test_what_others_ask_for_holds_up_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on while requests wait to begin; one that was cancelled before costs nothing."""
    engine = demo_engine()
    happened: list[str] = []
    submit, forward = engine.submit, engine.steps.forward

    def slowly(request: Request) -> SequenceEvent | None:
        happened.append(request.request_id)
        if request.request_id != "stream":
            time.sleep(COMMAND_SECONDS / 2)
        return submit(request)

    def computed(*arguments: object) -> object:
        happened.append("step")
        return forward(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "submit", slowly)
    monkeypatch.setattr(engine.steps, "forward", computed)
    done: list[SequenceEvent] = []

    def commands() -> Iterator[Commands | None]:
        yield from (asked("stream", 1, max_tokens=100), asked("many", 20), asked("left", 500))
        while "many" not in happened:
            yield None
        yield Commands(cancel=("left",))
        while len(done) != 21:
            yield None

    def emit(output: StepOutput) -> None:
        done.extend(event for event in output.events if event.finish_reason is not None)

    run_engine(engine, Source(commands()), emit, report_seconds=0.01)
    engine.check_idle()
    engine.close()
    assert happened.count("many") == 20
    assert "left" not in happened
    between_steps = "".join("." if each == "step" else each[0] for each in happened).split(".")
    assert max(len(each) for each in between_steps[1:]) <= 3  # 10 ms, and the last one begun
