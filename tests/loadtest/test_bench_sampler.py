"""``lexshard bench sampler``: the port in torch is the standard sampler, every contender sees the
same steps and draws the same tokens, and ratios are of neighbouring runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.loadtest.bench.record import Report
from lexshard.loadtest.bench.sampler import command as sampler
from lexshard.loadtest.bench.sampler import scaling
from lexshard.loadtest.bench.sampler.case import SamplerCase, Sets, steps_per_run
from lexshard.loadtest.bench.sampler.contenders import TimedSteps, TorchContender
from lexshard.loadtest.bench.sampler.messages import candidate_rows
from lexshard.loadtest.bench.sampler.options import (
    CANDIDATES,
    NAIVE,
    OFFLOADED,
    VLLM,
    add_arguments,
)
from lexshard.loadtest.bench.sampler.settings import SETTINGS, Setting
from lexshard.loadtest.bench.sampler.torch_sampler import TorchSampler, add_gumbel_noise
from lexshard.loadtest.bench.sampler.vllm_process import VllmProcess
from lexshard.loadtest.bench.sampler.workload import (
    CALIBRATION,
    RECENT,
    Pool,
    SamplerWorkload,
    synthetic_pool,
)

VOCABULARY = 3000
SAMPLED = [name for name, setting in SETTINGS.items() if not setting.greedy]


@pytest.fixture(scope="module")
def pool() -> Pool:
    return synthetic_pool(VOCABULARY, 40, seed=1)


def workload_of(pool: Pool, setting: Setting, *, batch: int = 4, steps: int = 6) -> SamplerWorkload:
    return SamplerWorkload(pool, setting, batch, history=60, steps=steps, seed=2)


# -- the port -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLED)
def test_the_port_keeps_the_tokens_that_our_truncation_keeps(pool: Pool, name: str) -> None:
    """Equal sets, but for rounding: torch adds up fp32 shares, we add up integers. So one set may
    hold one or two tokens more, at the boundary; more than one row in twenty would be an error."""
    workload = workload_of(pool, SETTINGS[name], batch=40)
    port = TorchContender(workload)
    for step in range(3):
        theirs, ours = port.kept(step), workload.kept(step)
        more, fewer = (theirs & ~ours).sum(axis=1), (ours & ~theirs).sum(axis=1)
        assert np.count_nonzero(more + fewer) <= 2
        assert (np.minimum(more, fewer) == 0).all()
        assert (more + fewer).max() <= 2
        port.take(range(step, step + 1))


def test_torch_keeps_every_token_that_ties_at_the_top_k_boundary_and_we_exactly_k() -> None:
    row = np.full(200, -3.0, np.float32)
    row[[5, 9]] = 4.0
    row[20:120] = 1.0
    rows = np.tile(row, (CALIBRATION, 1))
    workload = workload_of(Pool.of("ties", rows, rows), Setting("top 50", top_k=50), batch=1)
    assert TorchContender(workload).kept(0).sum() == 102
    kept = np.flatnonzero(workload.kept(0)[0])
    assert kept.tolist() == [5, 9, *range(20, 68)]


def test_the_port_penalises_as_the_documentation_says(pool: Pool) -> None:
    setting = dataclasses.replace(SETTINGS["penalties"], temperature=0.7)
    workload = workload_of(pool, setting)
    outputs = [
        [*tokens, *workload.appended[:2, row].tolist()]
        for row, tokens in enumerate(workload.outputs.tolist())
    ]
    port = TorchSampler(setting, torch.from_numpy(workload.prompts))
    found = port.process(torch.from_numpy(workload.logits(2)), outputs).numpy()
    assert (workload.adjusted(2) != workload.logits(2)).any(axis=1).all()
    assert found == pytest.approx(workload.adjusted(2) / 0.7, rel=1e-5, abs=1e-5)


def test_outputs_of_different_lengths_are_padded() -> None:
    setting = Setting("frequency", frequency=0.5)
    port = TorchSampler(setting, torch.tensor([[1], [1]]))
    found = port.process(torch.zeros(2, 4), [[3, 3, 2], [0]])
    assert found.tolist() == [[0.0, 0.0, -0.5, -1.0], [-0.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("kept", [5, 3])
def test_the_ports_draw_follows_the_softmax(kept: int) -> None:
    """Chi-square over 20,000 draws; false alarm below 1e-6 (4 degrees of freedom: 33.4)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    logits[kept:] = -torch.inf
    expected = 20_000 * logits.softmax(dim=0)[:kept]
    rows = logits.repeat(20_000, 1)
    add_gumbel_noise(rows, np.random.Generator(np.random.SFC64(3)), only_kept=kept < 5)
    counts = torch.bincount(rows.argmax(dim=1), minlength=5)
    assert int(counts[kept:].sum()) == 0
    assert float(((counts[:kept] - expected) ** 2 / expected).sum()) < 33.4


def test_a_greedy_port_takes_the_largest_penalised_logit(pool: Pool) -> None:
    workload = workload_of(pool, dataclasses.replace(SETTINGS["penalties"], temperature=0.0))
    port = TorchSampler(workload.setting, torch.from_numpy(workload.prompts))
    found = port.sample(torch.from_numpy(workload.logits(0)), workload.outputs.tolist())
    assert found.tolist() == workload.adjusted(0).argmax(axis=1).tolist()


# -- workloads ------------------------------------------------------------------------------------


def test_the_seed_decides_a_scene_and_histories_have_the_length_that_was_asked_for(
    pool: Pool,
) -> None:
    first, again = workload_of(pool, SETTINGS["all"]), workload_of(pool, SETTINGS["all"])
    for name in ("prompts", "outputs", "places", "appended"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert first.prompts.shape[1] + first.outputs.shape[1] == 60
    assert np.array_equal(first.logits(3), pool.rows[first.places[3]])


def test_rows_to_calibrate_on_are_not_decided(pool: Pool) -> None:
    assert pool.calibration.shape == (CALIBRATION, VOCABULARY)
    decided = {row.tobytes() for row in pool.rows}
    assert decided.isdisjoint(row.tobytes() for row in pool.calibration)
    assert pool.frequency.shape == (VOCABULARY,)
    assert pool.frequency.sum() == pytest.approx(1.0)


def test_long_histories_hold_no_more_of_what_could_be_drawn_than_short_ones(pool: Pool) -> None:
    likely = np.unique(pool.likely)
    found = []
    for history in (100, 5000):
        workload = SamplerWorkload(pool, SETTINGS["all"], 4, history, steps=1, seed=2)
        recent = np.concatenate([workload.prompts, workload.outputs], axis=1)[:, -RECENT:]
        assert np.isin(recent, likely).all()
        found.append(recent.shape[1])
    assert found == [RECENT, RECENT]


@pytest.mark.parametrize("name", SETTINGS)
def test_candidates_are_sorted_and_hold_all_that_can_be_drawn(pool: Pool, name: str) -> None:
    workload = workload_of(pool, SETTINGS[name])
    rows = candidate_rows(workload, 1, range(4))
    kept = workload.kept(1)
    for row in range(4):
        own = slice(rows.offsets[row], rows.offsets[row + 1])
        ids = rows.ids[own]
        assert (np.diff(ids) > 0).all()
        assert np.array_equal(rows.raw[own], workload.logits(1)[row, ids])
        if workload.setting.certificate in ("topk", "minp", "nucleus", "top1"):
            assert set(np.flatnonzero(kept[row])) <= set(ids.tolist())


# -- a case ---------------------------------------------------------------------------------------


class Recorder:
    """A contender that notes its steps and always draws the same."""

    def __init__(self, name: str, tokens: npt.NDArray[np.int64] | None = None) -> None:
        self.name = name
        self.steps: list[int] = []
        self._tokens = tokens

    def take(self, steps: range) -> TimedSteps:
        self.steps.extend(steps)
        return [(1.0 + step, self._tokens) for step in steps]


def case_of(workload: SamplerWorkload) -> SamplerCase:
    return SamplerCase(workload, {"V": workload.vocabulary_size})


def test_every_side_takes_every_step_once_and_warm_up_does_not_count(pool: Pool) -> None:
    size = steps_per_run(4)
    case = case_of(workload_of(pool, SETTINGS["none"], steps=3 * size))
    contenders = [Recorder("first"), Recorder("second")]
    case.take_turns(contenders, runs=2)
    assert contenders[0].steps == contenders[1].steps == list(range(3 * size))
    assert {name: len(times) for name, times in case.milliseconds.items()} == {
        "first": 2,
        "second": 2,
    }
    assert case.largest["first"] == [1e3 * 2 * size, 1e3 * 3 * size]


def test_ratios_are_of_neighbouring_runs(pool: Pool) -> None:
    """The machine slows down in the second and third run: the ratio does not move."""
    case = case_of(workload_of(pool, SETTINGS["none"]))
    case.milliseconds = {
        VLLM: [4.0, 40.0, 44.0],
        NAIVE: [4.0, 40.0, 44.0],
        OFFLOADED: [1.0, 10.0, 11.0],
    }
    case.largest = {key: [1.0, 1.0, 1.0] for key in case.milliseconds}
    assert case.ratio(OFFLOADED) == 4.0
    report = Report({}, {}, "", 0)
    case.record(report)
    found = {each.case["of"]: (each.against, each.ratio) for each in report.ratios}
    assert found == {NAIVE: (VLLM, 1.0), OFFLOADED: (VLLM, 4.0)}


def test_without_vllm_the_port_is_what_counts(pool: Pool) -> None:
    case = case_of(workload_of(pool, SETTINGS["none"]))
    case.milliseconds = {NAIVE: [6.0], CANDIDATES: [2.0]}
    assert (case.baseline, case.ratio(CANDIDATES)) == (NAIVE, 3.0)


def test_a_wrong_token_is_counted(pool: Pool) -> None:
    case = case_of(workload_of(pool, SETTINGS["none"], steps=3 * steps_per_run(4)))
    case.take_turns([Recorder(OFFLOADED, np.full(4, -7))], runs=2)
    case.compare_tokens(2)
    assert (case.equal, case.compared) == (0, 8)


def test_sets_that_differ_are_counted() -> None:
    ours = np.array([[True, False, True], [True, True, False]])
    theirs = np.array([[True, False, True], [True, False, True]])
    sets = Sets()
    sets.add(ours, theirs)
    assert str(sets) == "1 of 2 rows (2 tokens in the others)"


@pytest.mark.parametrize(("batch", "count"), [(5, 2), (4, 4), (7, 3)])
def test_samplers_share_the_rows_evenly(batch: int, count: int) -> None:
    parts = scaling.parts(batch, count)
    assert [row for part in parts for row in range(batch)[part]] == list(range(batch))
    sizes = [part.stop - part.start for part in parts]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1


# -- the command ----------------------------------------------------------------------------------


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options)


SMALL = ("-V", "1000,1500", "--batch", "1,3", "--runs", "2", "--history", "20")
EACH = 2 * 2  # vocabularies and batches


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "POOL", 12)


@pytest.mark.slow  # every variant is compiled
@pytest.mark.usefixtures("small_pool")
def test_a_run_writes_times_sets_and_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sampler.json"
    controls = "all,topp,greedy"
    assert sampler.run(parse(*SMALL, "--controls", controls, "--json", str(path))) == 0
    captured = capsys.readouterr()
    assert "not measured, give --vllm-python" in captured.out
    assert "Not measured:" in captured.out
    written = json.loads(path.read_text())
    assert set(written) == {"machine", "versions", "command", "seed", "results", "ratios"}
    times = [each for each in written["results"] if each["case"]["measure"] == "time per row"]
    # 7 variants of 3 settings; one row is not split.
    assert len(times) == EACH * 3 * 7 - 2 * 3
    assert all(each["runs"] == 2 and each["median"] > 0 for each in times)
    equal = [each for each in written["results"] if "plain draw" in each["case"]["measure"]]
    assert [each["median"] for each in equal] == [100.0] * (EACH * 3)
    assert {each["against"] for each in written["ratios"]} == {NAIVE}
    assert len(written["ratios"]) == len(times) - EACH * 3
    sample = next(each for each in written["ratios"] if each["case"]["of"] == OFFLOADED)
    runs = {
        each["name"]: each["raw"]
        for each in times
        if each["case"] == {key: sample["case"][key] for key in each["case"]}
    }
    paired = [b / a for a, b in zip(runs[OFFLOADED], runs[NAIVE], strict=True)]
    assert sample["ratio"] == pytest.approx(np.median(paired))


@pytest.mark.usefixtures("small_pool")
def test_the_cost_of_a_longer_history_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("-V", "1000", "--batch", "2", "--runs", "2", "--history", "20,3000")
    few = ("--controls", "penalties", "--variants", f"{NAIVE},{CANDIDATES}")
    assert sampler.run(parse(*options, *few)) == 0
    assert "a history of 3,000 costs what one of 20 does, times: naive" in capsys.readouterr().out


@pytest.mark.usefixtures("small_pool")
def test_several_samplers_are_measured_in_threads_and_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sampler.json"
    options = ("-V", "1000", "--batch", "2", "--runs", "1", "--controls", "all")
    few = ("--history", "20", "--variants", NAIVE, "--samplers", "1,2", "--json", str(path))
    assert sampler.run(parse(*options, *few)) == 0
    assert "several samplers at a time" in capsys.readouterr().out
    cases = [each["case"] for each in json.loads(path.read_text())["results"]]
    places = {(case["samplers"], case["in"]) for case in cases if "samplers" in case}
    assert places == {(1, "threads"), (2, "threads"), (1, "processes"), (2, "processes")}


@pytest.mark.usefixtures("small_pool")
def test_a_wrong_token_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: SamplerCase, step: int) -> npt.NDArray[np.int64]:
        return np.full(case.workload.batch, -7)

    monkeypatch.setattr(SamplerCase, "_plain_draw", wrong)
    few = ("--controls", "none", "--variants", f"{NAIVE},{OFFLOADED}")
    assert sampler.run(parse("-V", "1000", "--batch", "1", "--runs", "1", *few)) == 1
    captured = capsys.readouterr()
    assert "2 tokens are wrong" in captured.err


def test_an_interpreter_without_vllm_is_one_clear_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if _has_vllm(sys.executable):
        pytest.skip("this environment has vLLM")
    assert sampler.run(parse("--vllm-python", sys.executable)) == 1
    assert "No module named 'vllm'" in capsys.readouterr().err


def test_a_missing_interpreter_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sampler.run(parse("--vllm-python", str(tmp_path / "python"))) == 1
    assert "no such interpreter" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [("--batch", "0"), ("--controls", "hot"), ("--variants", "fast"), ("-V", "many")]
)
def test_wrong_options_are_refused(wrong: Sequence[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*wrong)


VLLM_PYTHON = os.environ.get("LEXSHARD_VLLM_PYTHON", "")


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmProcess]:
    with VllmProcess(Path(VLLM_PYTHON), (0,), 1) as process:
        yield process


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON, reason="LEXSHARD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("name", SAMPLED)
def test_vllm_itself_keeps_the_ports_sets(pool: Pool, vllm: VllmProcess, name: str) -> None:
    workload = workload_of(pool, SETTINGS[name], batch=40)
    vllm.open(workload)
    port = TorchContender(workload)
    for step in range(3):
        assert np.array_equal(vllm.kept(), port.kept(step))
        assert len(vllm.run(1)) == 1
        port.take(range(step, step + 1))


def _has_vllm(python: str) -> bool:
    return subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode == 0
