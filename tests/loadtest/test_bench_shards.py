"""``lexshard bench shards``: several processes say what one does, what is repeated is what was
said, and the model is what its formula says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lexshard.actors.head.shard_group import ShardGroup
from lexshard.actors.head.sharded.part import build_ladder
from lexshard.actors.states.row_table import RowTable
from lexshard.loadtest.bench.head.workload import synthetic_workload
from lexshard.loadtest.bench.shards import command
from lexshard.loadtest.bench.shards.case import ShardCase
from lexshard.loadtest.bench.shards.fitted_link import fit_link
from lexshard.loadtest.bench.shards.model import HOPS, HeadSize, StepModel
from lexshard.loadtest.bench.shards.options import add_arguments
from lexshard.loadtest.bench.shards.published import LINKS, MEMORY_BANDWIDTH, Link
from lexshard.loadtest.bench.shards.recorded_shard import RecordedShard
from lexshard.loadtest.bench.shards.timed_shard import TimedShard
from lexshard.loadtest.bench.shards.workload import NEEDS, ShardWorkload, drawn

NVLINK, _, _, SLOW_ETHERNET = LINKS
HEAD = HeadSize(vocabulary=128_256, columns=8_192, batch=1, candidates=58, rescored=64)


def parsed(options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options.split())


@pytest.fixture(scope="module")
def workload() -> ShardWorkload:
    return ShardWorkload(
        synthetic_workload("independent", 700, 64, torch.bfloat16, seed=8), "int8", 4
    )


# -- measured -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_processes_say_what_one_says_and_every_figure_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shards.json"
    options = f"-V 700 -d 64 --shards 2,3 --batch 1,4 --runs 2 --json {path}"
    assert command.run(parsed(options)) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    measured = [each for each in written["results"] if "need" in each["case"]]
    seen = {(each["case"]["shards"], each["case"]["need"]) for each in measured}
    assert seen == {(shards, need) for shards in (1, 2, 3) for need in NEEDS}
    medians = {
        (each["case"]["shards"], each["case"]["batch"], each["case"]["measure"]): each["median"]
        for each in measured
        if each["case"]["need"] == "greedy"
    }
    for shards in (2, 3):
        # Two frames, and thresholds there and back.
        assert medians[shards, 1, "bytes per token and shard"] == 2 * 1024 + 32
        assert medians[shards, 4, "hidden state per token and shard"] == 64 * 4
        assert medians[shards, 1, "exchange of a step"] > 0
    assert all(
        each["median"] == 0 for each in measured if each["case"]["measure"].startswith("tokens")
    )
    modelled = [each for each in written["results"] if "need" not in each["case"]]
    assert modelled
    assert all("MODEL" in each["case"]["measure"] for each in modelled)
    printed = capsys.readouterr().out
    assert "A MODEL, NOT A MEASUREMENT" in printed
    assert "gloo, fitted here" in printed or len(written["machine"]["pinned_to_cores"]) == 1
    if len(written["machine"]["pinned_to_cores"]) < 3:
        assert "NOT those of a cluster" in printed


@pytest.mark.slow
def test_csv_decodes_exchange_is_measured_on_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "shards.json"
    options = f"-V 700 -d 64 --shards 2 --batch 1,4 --runs 2 --clusters 24 --json {path}"
    assert command.run(parsed(options)) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    found = [each for each in written["results"] if each["case"].get("exchange") == "csv-decode"]
    assert {(each["case"]["batch"], each["case"]["need"]) for each in found} == {
        (batch, need) for batch in (1, 4) for need in NEEDS
    }
    printed = capsys.readouterr().out
    assert "the ladder's" in printed


def test_a_token_that_one_shard_would_not_say_is_counted() -> None:
    single, several = ShardCase(1, 2, "greedy"), ShardCase(2, 2, "greedy")
    single.tokens = [np.array([5, 6]), np.array([7, 8])]
    several.tokens = [np.array([5, 6]), np.array([7, 9])]
    several.compare(single)
    assert several.wrong == 1


def test_wrong_tokens_are_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ShardCase(1, 1, "greedy", step=[1.0], compute=[1.0], packing=[0.0], exchange=[0.0])
    wrong.wrong = 3
    monkeypatch.setattr(command, "measure_shards", lambda *_: ([wrong], []))
    assert command.run(parsed("")) == 1
    assert "3 tokens are wrong" in capsys.readouterr().err


@pytest.mark.parametrize("need", NEEDS)
def test_what_is_repeated_is_what_was_said_and_costs_no_shard_anything(
    workload: ShardWorkload, need: str
) -> None:
    parts = workload.parts(2)
    timed = [TimedShard(build_ladder(part)) for part in parts]
    group = ShardGroup(
        [RecordedShard(shard, 2, 4) for shard in timed], [part.owned.ids for part in parts]
    )
    steps = [workload.step(need, 4, number % 2) for number in range(6)]
    said = []
    for number, (hidden, needs) in enumerate(steps):
        for shard in timed:
            shard.start()
        said.append(drawn(group.rescore(group.screen(hidden, RowTable.of(needs))), needs).tolist())
        assert all((shard.milliseconds > 0) == (number < 2) for shard in timed)
    assert said[:2] * 2 == said[2:]
    hidden, needs = steps[0]
    group.screen(hidden, RowTable.of(needs))  # the next case begins
    assert all(shard.milliseconds > 0 for shard in timed)


@pytest.mark.parametrize("options", ["--need beam", "--batch 0", "--link fast", "--model-head 7"])
def test_impossible_options_are_refused(options: str) -> None:
    with pytest.raises(SystemExit):
        parsed(options)


# -- fitted ---------------------------------------------------------------------------------------


def exchange_case(shards: int, batch: int, milliseconds: float, busy: float = 0.1) -> ShardCase:
    case = ShardCase(shards, batch, "greedy", exchange=[milliseconds], busy=[busy])
    case.hops, case.step_bytes, case.hidden_bytes = 5, [2_000 * batch], 0
    return case


def test_latency_and_bandwidth_are_those_that_made_the_exchanges() -> None:
    cases = [exchange_case(2, batch, 5 * 0.05 + 2e3 * batch / 1e6) for batch in (1, 8, 32)]
    # These had to share cores: of them only what the root's processor did is believed.
    cases += [exchange_case(4, batch, 30.0, busy=0.1 + 2 * 5 * 0.003) for batch in (1, 8, 32)]
    link = fit_link(cases, cores=2)
    assert link is not None
    assert link.base == pytest.approx(50, rel=1e-6)
    assert link.bandwidth == pytest.approx(1e9, rel=1e-6)
    assert link.per_peer == pytest.approx(3, rel=1e-6)


def test_nothing_is_fitted_where_all_shared_cores() -> None:
    assert fit_link([ShardCase(1, 1, "greedy"), exchange_case(2, 1, 1.0)], cores=1) is None


# -- modelled -------------------------------------------------------------------------------------


def test_one_shard_exchanges_nothing_and_reads_everything() -> None:
    model = StepModel(HEAD, MEMORY_BANDWIDTH, SLOW_ETHERNET)
    read = 128_256 * (8_192 + 16) + 64 * 2 * 8_192
    assert model.step(1) == pytest.approx(1e6 * read / 3.35e12)
    assert model.exchange(1) == 0


def test_a_modelled_step_is_the_sum_of_its_formula() -> None:
    link = Link("made up", bandwidth=1e9, base=10, per_level=1, per_peer=0.5, broadcasts=False)
    found = StepModel(HEAD, 1e12, link).step(8)
    screen, rescored = 128_256 * 8_208 / 8, 64 * 2 * 8_192
    carried = 7 * (2 * 1024 + 32 + 4 * 8_192)
    assert found == pytest.approx((screen + rescored) / 1e6 + HOPS * (10 + 3 + 3) + carried / 1e3)


def test_hidden_states_leave_a_root_once_where_they_are_broadcast() -> None:
    def carried(broadcasts: bool) -> float:
        link = Link("made up", 1e9, 0, broadcasts=broadcasts)
        return 1e3 * StepModel(HEAD, 1e12, link).exchange(5)

    assert carried(False) - carried(True) == pytest.approx(3 * 4 * 8_192)


def test_shards_stop_to_pay_earlier_over_a_slower_link() -> None:
    near, far = (StepModel(HEAD, MEMORY_BANDWIDTH, link) for link in (NVLINK, SLOW_ETHERNET))
    assert near.worth_it() > far.worth_it() >= 1
    assert near.fastest() >= far.fastest()
    assert near.step(near.fastest()) <= min(near.step(shards) for shards in (1, 2, 4, 8, 16, 64))


def test_the_model_alone_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(parsed("--model-only --model-head 1000,64 --link InfiniBand=50,8")) == 0
    printed = capsys.readouterr().out
    assert "MODEL: V" in printed
    assert "InfiniBand" in printed
    assert "NVLink" not in printed
