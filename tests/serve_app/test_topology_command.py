"""``lexshard topology plan``: through the entry that users call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lexshard.serve_app.cli import main
from tests.support.paths import DEMO, DEMO_DRAFT

pytestmark = pytest.mark.usefixtures("no_options_of_the_machine")

NODE = "cpus=8,memory=16GiB"
Captured = pytest.CaptureFixture[str]


def plan(*arguments: str, nodes: str = NODE) -> int:
    return main(["topology", "plan", "--model", str(DEMO), "--nodes", nodes, *arguments])


def test_a_plan_says_what_goes_where(tmp_path: Path, capsys: Captured) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"token_ids": [*range(0, 6400, 3), 7, 7]}) + "\n")
    hot = ["--shards", "2", "--samplers", "2", "--shard-assignment", "blocks-hotness"]
    assert plan(*hot, "--shard-trace", str(trace), "--draft", str(DEMO_DRAFT)) == 0
    shown = capsys.readouterr().out
    for told in ("blocks-hotness", "STRICT_PACK", '{"CPU": 4.0}', "draft model", "dense rows"):
        assert told in shown
    assert plan(*hot, "--shard-trace", str(trace), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"] == [8192, 8192]
    assert data["work_balance"] < 1.05


def test_a_forecast_is_called_a_model(capsys: Captured) -> None:
    command = ["topology", "plan", "--model", str(DEMO), "--forecast", "8", "64"]
    assert main([*command, "--gpu", "h100", "--context", "512"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("A MODEL, not a measurement: lexshard-demo on H100")
    assert "64 GPUs, nodes of 8: 8" in shown
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["gpus"], each["ranks"]) for each in told[3:5]] == [(8, 8), (64, 1)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--shards", "300"], "256 blocks of 64 ids"),
        (["--shards", "9"], "cannot place shard 8: it needs 1 CPU"),
        (["--shard-assignment", "round"], "option 'shard_assignment'"),
        (["--shard-assignment", "blocks-hotness"], "give a --shard-trace"),
        (["--shard-assignment", "clusters-semantic"], "lexshard index build"),
        (["--shard-trace", "absent"], "/absent: give a file"),
        (["--index", "absent"], "/absent: make one with"),
        (["--gpus-per-shard", "1"], "cannot place the engine: it needs 1 GPU"),
        (["--nodes", "cpus=8"], "says no memory"),
        (["--context", "512"], "give --forecast"),
        (["--dtype", "int3"], "'dtype'"),
    ],
)
def test_what_cannot_be_planned_is_told_in_one_line(
    arguments: list[str], told: str, capsys: Captured
) -> None:
    assert plan(*arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
