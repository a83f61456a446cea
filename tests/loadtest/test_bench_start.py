"""`lexshard bench start`: the phases of a start add up, and nothing of the user's is touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lexshard.actors.index.automatic import FILE_NAME
from lexshard.loadtest.bench import start
from lexshard.loadtest.bench.record import Report
from lexshard.loadtest.bench.servers.asking import KilledStream, silence_after
from lexshard.loadtest.bench.servers.command import ServerCommand
from lexshard.loadtest.bench.start import (
    BEFORE,
    LAST,
    StartRun,
    first_start,
    phases,
    record_starts,
    start_once,
)
from lexshard.serve_app.cli import main
from tests.support.paths import ROOT

ENDPOINT = f"{sys.executable} -m tests.support.scripted_endpoint {{port}}"
# The engine's seconds count from its own start, and lines of two processes may cross.
PRINTED = [
    (0.5, "lexshard serve: 3 of 65 options set\n"),
    (0.75, "[  0.0 s] starting the engine\n"),
    (2.0, "[  1.2 s] not ready: the engine is starting\n"),
    (2.25, "[  0.9 s] engine: compiling kernels, 1 of 80, once on this machine\n"),
    (2.375, "[  1.0 s] engine: compiling kernels, 9 of 80, once on this machine\n"),
    (2.5, "[  1.1 s] engine: loading the weights\n"),
    (3.0, "[  1.9 s] engine: preparing the head: index\n"),
    (5.0, "lexshard is ready\n"),
    (5.5, "[  9.0 s] a line that comes too late\n"),
]


def test_phases_add_up_to_the_first_token() -> None:
    found = phases(PRINTED, healthy=5.25, first_token=6.0)
    assert found == {
        BEFORE: 0.75,
        "starting the engine": 1.5,
        "engine: compiling kernels": 0.25,
        "engine: loading the weights": 0.5,
        "engine: preparing the head: index": 2.0,
        LAST: 1.0,
    }
    assert list(found)[-1] == LAST
    assert sum(found.values()) == 6.0


def test_a_stream_goes_on_after_its_longest_silence() -> None:
    assert silence_after(10.0, [17.5, 17.6]) == 7.5
    # What the engine had sent before it died comes a little later.
    assert silence_after(10.0, [10.01, 10.02, 17.5, 17.6]) == 7.5


def test_a_first_start_finds_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {}
    for name in ("target", "draft"):
        models[name] = tmp_path / name
        models[name].mkdir()
        (models[name] / "weights").write_text(name)
    (models["target"] / FILE_NAME).write_text("index")
    (models["target"] / f"{FILE_NAME}.part-int8").write_text("part of an index")
    seen: list[Path] = []

    def look(server: ServerCommand, seed: int) -> StartRun:
        words = server.command
        target, draft = (
            Path(words[len(words) - 1 - words[::-1].index(option) + 1])
            for option in ("--model", "--draft")
        )
        home = Path(server.environment["LEXSHARD_HOME"])
        assert (target.name, draft.name) == ("target", "draft")
        assert [path.name for path in target.iterdir()] == ["weights"]
        assert (draft / "weights").read_text() == "draft"
        assert not home.exists()
        (target / FILE_NAME).write_text("another index")
        seen.extend((target, draft, home))
        return StartRun(0.0, 0.0, 0.0, {})

    monkeypatch.setattr(start, "start_once", look)
    flags = ["--model", str(models["target"]), f"--draft={models['draft']}", "--threads", "1"]
    first_start(flags, seed=1)
    assert len(seen) == 3
    assert not any(path.exists() for path in seen)
    assert (models["target"] / FILE_NAME).read_text() == "index"


def test_starts_of_all_servers_are_kept_and_compared() -> None:
    report = Report({}, {}, "", 0)
    ours = [StartRun(0.5, 6.0, 6.5, {"a": 6.0, LAST: 0.5}), StartRun(0.5, 7.0, 7.5, {"a": 7.5})]
    record_starts(report, "warm", {"lexshard": ours, "b": [StartRun(9.0, 12.0, 13.0, {})] * 2})
    found = {
        (each.name, each.case["measure"], each.case.get("phase")): each.raw
        for each in report.results
    }
    assert found["lexshard", "first token", None] == (6.5, 7.5)
    assert found["b", "healthy", None] == (12.0, 12.0)
    assert found["lexshard", "phase", "a"] == (6.0, 7.5)
    assert found["lexshard", "phase", LAST] == (0.5,)
    ratios = {each.case["measure"]: each.ratio for each in report.ratios}
    assert ratios["first token"] == pytest.approx((13 / 6.5 + 13 / 7.5) / 2)


def test_another_server_is_timed_by_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = start_once(ServerCommand("tiny", tuple(ENDPOINT.split())), seed=1)
    assert 0 < run.port_open < run.healthy < run.first_token
    assert sum(run.phases.values()) == pytest.approx(run.first_token)


def test_a_stream_with_another_text_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "_on_one_server", lambda *_: [KilledStream(7.0, same=False)])
    assert main(["bench", "start", "--case", "after-kill"]) == 1
    printed = capsys.readouterr()
    assert "undisturbed: 0 of 1" in printed.out
    assert "1 streams after a kill are wrong" in printed.err


@pytest.mark.slow
def test_a_real_server_whose_engine_is_killed_goes_on_with_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "start.json"
    options = ["--case", "after-kill,status", "--runs", "1", "--json", str(path)]
    assert main(["bench", "start", *options, "--", "--threads", "1"]) == 0
    assert "undisturbed: 1 of 1" in capsys.readouterr().out
    report = json.loads(path.read_text())
    medians = {each["case"]["case"]: each["median"] for each in report["results"]}
    assert medians["after-kill"] > medians["status"] > 0
