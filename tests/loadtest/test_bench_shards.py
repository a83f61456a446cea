"""``lexshard bench shards``: several processes say what one does, what is repeated is what was
said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lexshard.actors.head.sharded.part import build_ladder
from lexshard.actors.states.row_table import RowTable
from lexshard.loadtest.bench import shards
from lexshard.loadtest.bench.contenders.shard_group import ShardGroup
from lexshard.loadtest.bench.contenders.shard_processes import RecordedShard, TimedShard
from lexshard.loadtest.bench.options.shards import add_arguments
from lexshard.loadtest.bench.shards import (
    NEEDS,
    ShardCase,
    drawn,
    parts_of,
    step_of,
)
from lexshard.loadtest.bench.synthetic.head_workload import HeadWorkload, synthetic_workload
from tests.support.bench_options import parsed


@pytest.fixture(scope="module")
def workload() -> HeadWorkload:
    return synthetic_workload(700, 64, torch.bfloat16, seed=8)


@pytest.mark.slow
def test_real_processes_say_what_one_says_and_every_figure_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shards.json"
    options = f"-V 700 -d 64 --shards 2,3 --batch 1,4 --runs 2 --json {path}"
    assert shards.run(parsed(add_arguments, *options.split())) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    measured = [each for each in written["results"] if "need" in each["case"]]
    seen = {(each["case"]["shards"], each["case"]["need"]) for each in measured}
    assert seen == {(count, need) for count in (1, 2, 3) for need in NEEDS}
    medians = {
        (each["case"]["shards"], each["case"]["batch"], each["case"]["measure"]): each["median"]
        for each in measured
        if each["case"]["need"] == "greedy"
    }
    for count in (2, 3):
        # Two frames, and thresholds there and back.
        assert medians[count, 1, "bytes per token and shard"] == 2 * 1024 + 32
        assert medians[count, 4, "hidden state per token and shard"] == 64 * 4
        assert medians[count, 1, "exchange of a step"] > 0
    assert all(
        each["median"] == 0 for each in measured if each["case"]["measure"].startswith("tokens")
    )
    assert "NOT those of a cluster" in capsys.readouterr().out


def test_a_token_that_one_shard_would_not_say_is_counted() -> None:
    single, several = ShardCase(1, 2, "greedy"), ShardCase(2, 2, "greedy")
    single.tokens = [np.array([5, 6]), np.array([7, 8])]
    several.tokens = [np.array([5, 6]), np.array([7, 9])]
    assert several.wrong(single) == 1


@pytest.mark.parametrize("need", NEEDS)
def test_what_is_repeated_is_what_was_said_and_costs_no_shard_anything(
    workload: HeadWorkload, need: str
) -> None:
    parts = parts_of(workload, "int8", 4, 2)
    timed = [TimedShard(build_ladder(part)) for part in parts]
    group = ShardGroup(
        [RecordedShard(shard, 2, 4) for shard in timed], [part.owned.ids for part in parts]
    )
    steps = [step_of(workload, need, 4, number % 2) for number in range(6)]
    said = []
    for number, step in enumerate(steps):
        for shard in timed:
            shard.milliseconds = 0.0
        found = group.rescore(group.screen(step.hidden, RowTable.of(step.needs)))
        said.append(drawn(found, step.needs).tolist())
        assert all((shard.milliseconds > 0) == (number < 2) for shard in timed)
    assert said[:2] * 2 == said[2:]
    group.screen(steps[0].hidden, RowTable.of(steps[0].needs))  # the next case begins
    assert all(shard.milliseconds > 0 for shard in timed)
