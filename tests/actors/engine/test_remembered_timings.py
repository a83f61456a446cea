"""What a first start measured, the next one knows; unless anything that it depends on changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lexshard.actors import remembered
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.speculation import CostTiming, Speculation
from lexshard.actors.engine.start import remembered_timings
from lexshard.actors.engine.start.remembered_timings import RememberedTimings
from lexshard.actors.engine.threads.measurement import ThreadTiming
from lexshard.actors.head.calibration import Timing
from lexshard.kernels import ahead
from lexshard.kernels.ahead import ONE_CALL, SEVERAL_STEPS
from lexshard.kernels.home import VARIABLE
from tests.support.paths import DEMO, DEMO_DRAFT

THREADS = [ThreadTiming(1, 1, 0.25), ThreadTiming(64, 2, 3.5)]
SCREENS = [Timing("one", 1, "int4", 0.1, 0.0), Timing("several", 8, "dense-fp32", 1 / 3, 0.5)]
COSTS = [CostTiming("drafting", 2, 0.001, depth=3), CostTiming("step", 4, 0.002)]


class Measured:
    """A model, and how often its timings were measured."""

    def __init__(self, folder: Path) -> None:
        self.count = 0
        for name in ("model", "draft"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text("{}")
            (folder / name / "model.safetensors").write_bytes(bytes(100))
        self.configuration = EngineConfiguration(
            model=str(folder / "model"), draft=str(folder / "draft")
        )

    def time_threads(self, body: Any, head: Any, candidates: Any) -> list[ThreadTiming]:
        self.count += 1
        return THREADS

    def calibrate(self, shard: Any, names: Any, hidden: Any, largest: int) -> list[Timing]:
        self.count += 1
        return SCREENS

    def costs(self) -> list[CostTiming]:
        self.count += 1
        return COSTS

    def start(self, configuration: EngineConfiguration | None = None, largest: int = 64) -> int:
        """An engine's start; how many of three timings were measured."""
        before = self.count
        none = cast(Any, None)
        timings = RememberedTimings(configuration or self.configuration)
        assert timings.time_threads(none, none, (1, 2)) == THREADS
        assert timings.calibrate(none, ("int4",), none, largest) == SCREENS
        assert timings.measure_costs(self.costs) == COSTS
        return self.count - before


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "home"))
    made = Measured(tmp_path)
    monkeypatch.setattr(remembered_timings, "time_threads", made.time_threads)
    monkeypatch.setattr(remembered_timings, "calibrate", made.calibrate)
    remembered.software_and_machine.cache_clear()
    yield made
    remembered.software_and_machine.cache_clear()


def test_a_second_start_measures_nothing(measured: Measured) -> None:
    assert [measured.start() for _ in range(3)] == [3, 0, 0]


def test_what_is_measured_before_all_is_compiled_is_not_kept(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as first_start:
        for function in (ONE_CALL, SEVERAL_STEPS):
            first_start.setattr(ahead, "_postponed", {function})
            assert measured.start() == 3
    assert [measured.start(), measured.start()] == [3, 0]


def test_configurations_do_not_push_each_other_out(measured: Measured) -> None:
    other = replace(measured.configuration, max_running=8)
    starts = [measured.start(each) for each in (None, other, None, other)]
    assert starts == [3, 3, 0, 0]


@pytest.mark.parametrize("model", ["model", "draft"])
def test_other_weights_are_measured_again(measured: Measured, tmp_path: Path, model: str) -> None:
    measured.start()
    weights = tmp_path / model / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert [measured.start(), measured.start()] == [3, 0]
    weights.write_bytes(bytes(101))
    assert [measured.start(), measured.start()] == [3, 0]


def test_what_the_timings_are_of_is_compared(measured: Measured) -> None:
    measured.start()
    assert [measured.start(largest=32), measured.start(largest=32)] == [1, 0]


@pytest.mark.parametrize(
    ("module", "name", "replacement"),
    [
        (remembered, "sources_digest", lambda folder: "other sources"),
        (remembered, "_version", lambda library: "99.0"),
        (remembered, "processor_model", lambda: "another processor"),
        (remembered, "available_cores", lambda: 77),
    ],
)
def test_another_machine_or_software_measures_again(
    measured: Measured,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    replacement: Callable[..., Any],
) -> None:
    measured.start()
    monkeypatch.setattr(module, name, replacement)
    remembered.software_and_machine.cache_clear()
    assert [measured.start(), measured.start()] == [3, 0]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"fingerprint": "", "value": \xff}'])
def test_a_damaged_file_is_measured_again_and_told(
    measured: Measured, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    measured.start()
    (kept,) = (tmp_path / "home" / "remembered").glob("threads-*")
    kept.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert measured.start() == 1
    assert [str(kept) in each.getMessage() for each in caplog.records] == [True]
    assert measured.start() == 0


def test_without_its_files_everything_is_measured_again(measured: Measured, tmp_path: Path) -> None:
    measured.start()
    for kept in (tmp_path / "home" / "remembered").iterdir():
        kept.unlink()
    assert measured.start() == 3


def test_a_home_that_cannot_be_written_is_no_error(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    assert [measured.start(), measured.start()] == [3, 3]


def test_a_model_without_files_is_measured(measured: Measured, tmp_path: Path) -> None:
    gone = replace(measured.configuration, model=str(tmp_path / "gone"))
    assert [measured.start(gone), measured.start(gone)] == [3, 3]


@pytest.mark.slow
def test_an_engine_chooses_the_same_and_shows_the_timings_that_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    configuration = EngineConfiguration(model=str(DEMO), draft=str(DEMO_DRAFT), max_running=2)
    first = Engine(configuration)
    first.warm_up()

    def never(*given: object) -> Any:
        raise AssertionError("this was measured before")

    for name in ("time_threads", "calibrate"):
        monkeypatch.setattr(remembered_timings, name, never)
    monkeypatch.setattr(Speculation, "timings", property(never))
    second = Engine(configuration)
    second.warm_up()
    for name in ("head", "head_timings", "threads", "thread_choices", "thread_timings"):
        assert getattr(second.information, name) == getattr(first.information, name)
    assert first.information.head_timings
