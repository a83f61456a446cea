"""Random combinations of what a request may ask for: no sequence is forgotten, none says anything
else."""

from __future__ import annotations

from typing import Any

import pytest

from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.sequence import Sequence
from lexshard.actors.messages import Request
from lexshard.loadtest.chaos import combinations
from lexshard.loadtest.chaos.combinations import run_combinations, shapes
from lexshard.loadtest.chaos.report import ChaosReport
from tests.support.paths import DEMO, DEMO_DRAFT


def found(only: str, count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The promises that one shape breaks."""
    monkeypatch.setattr(combinations, "EACH_QUICK", count)
    report = ChaosReport({}, {}, "", 17)
    run_combinations(report, str(DEMO), shapes(str(DEMO_DRAFT)), quick=True, only=only)
    assert [row.case for row in report.rows] == [only]
    assert report.rows[0].requests >= count
    return report.broken


@pytest.mark.parametrize("shape", ["right guesses", "little room"])
def test_what_sequences_say_is_what_a_plain_engine_says(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(shape, 60, monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", shapes(""))
def test_whatever_the_engine(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(shape, 300, monkeypatch) == []


@pytest.mark.slow
def test_a_sequence_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one was whose last guess stood and that had nothing left to say."""

    def forgetful(self: Sequence, length: int, pool: Any) -> None:
        roll_back(self, length + (length == len(self.token_ids) - 1), pool)

    roll_back, run_to_completion = Sequence.roll_back, combinations.run_to_completion

    def forgets_afterwards(engine: Engine, requests: list[Request]) -> Any:
        """The plain engine is not watched: where its masks are late, it rolls back, too."""
        told = run_to_completion(engine, requests)
        monkeypatch.setattr(Sequence, "roll_back", forgetful)
        return told

    monkeypatch.setattr(combinations, "run_to_completion", forgets_afterwards)
    broken = found("right guesses", 400, monkeypatch)
    assert any("in no plan for 100 steps" in each for each in broken)
