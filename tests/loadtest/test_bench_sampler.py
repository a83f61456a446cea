"""``lexshard bench sampler``: the port in torch is the standard sampler, every contender sees the
same steps and draws the same tokens, and ratios are of neighbouring runs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.actors.states.deltas import Deltas
from lexshard.loadtest.bench import sampler
from lexshard.loadtest.bench.contenders.sampler import Step, TorchSamplers, candidate_work
from lexshard.loadtest.bench.options.sampler import (
    NAIVE,
    OFFLOADED,
    SETTINGS,
    VARIANTS,
    Setting,
    add_arguments,
)
from lexshard.loadtest.bench.peers.beside_vllm import VllmSamplers
from lexshard.loadtest.bench.peers.torch_sampler import TorchSampler
from lexshard.loadtest.bench.record import Report
from lexshard.loadtest.bench.synthetic.logits import (
    Pool,
    SamplerWorkload,
    synthetic_pool,
)
from tests.support.bench_options import parsed

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
    port = TorchSamplers(workload)
    for step in range(3):
        theirs, ours = port.kept(step), workload.kept(step)
        more, fewer = (theirs & ~ours).sum(axis=1), (ours & ~theirs).sum(axis=1)
        assert np.count_nonzero(more + fewer) <= 2
        assert (np.minimum(more, fewer) == 0).all()
        assert (more + fewer).max() <= 2
        port.take(range(step, step + 1))


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


# -- workloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_candidates_are_sorted_and_hold_all_that_can_be_drawn(pool: Pool, name: str) -> None:
    workload = workload_of(pool, SETTINGS[name])
    rows = candidate_work(workload, 1, Deltas()).candidates
    assert rows is not None
    kept = workload.kept(1)
    for row in range(4):
        own = slice(rows.offsets[row], rows.offsets[row + 1])
        ids = rows.ids[own]
        assert (np.diff(ids) > 0).all()
        assert np.array_equal(rows.raw[own], workload.logits(1)[row, ids])
        if workload.setting.asks_for in ("topk", "minp", "nucleus", "top1"):
            assert set(np.flatnonzero(kept[row])) <= set(ids.tolist())


# -- a case ---------------------------------------------------------------------------------------


class Recorder:
    """A contender that notes its steps and always draws the same."""

    def __init__(self, tokens: npt.NDArray[np.int64] | None = None) -> None:
        self.steps: list[int] = []
        self._tokens = tokens

    def take(self, steps: range) -> list[Step]:
        self.steps.extend(steps)
        return [(1.0 + step, self._tokens) for step in steps]


def test_every_side_takes_every_step_once_and_wrong_tokens_are_counted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sampler.steps_per_run(4)
    workload = workload_of(pool, SETTINGS["none"], steps=3 * size)
    sides = {NAIVE: Recorder(), OFFLOADED: Recorder(np.full(4, -7))}
    monkeypatch.setattr(sampler, "sampler_contenders", lambda *_: sides)
    report = Report({}, {}, "", 0)
    assert sampler.measure_case(report, workload, (), None, 2) == (8, 8)
    assert sides[NAIVE].steps == sides[OFFLOADED].steps == list(range(3 * size))
    [times] = [
        each
        for each in report.results
        if each.name == NAIVE and each.case["measure"] == "time per row"
    ]
    assert times.raw == pytest.approx([(1.5 * size + 0.5) / 4, (2.5 * size + 0.5) / 4])
    assert [(each.against, each.case["of"], each.ratio) for each in report.ratios] == [
        (NAIVE, OFFLOADED, 1.0)
    ]


# -- the command ----------------------------------------------------------------------------------


parse = partial(parsed, add_arguments)
SMALL = ("-V", "1000,1500", "--batch", "1,3", "--runs", "2", "--history", "20")
EACH = 2 * 2  # vocabularies and batches


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "POOL", 12)


@pytest.mark.slow
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
    times = [each for each in written["results"] if each["case"]["measure"] == "time per row"]
    assert len(times) == EACH * 3 * len(VARIANTS)
    assert all(each["runs"] == 2 and each["median"] > 0 for each in times)
    equal = [each for each in written["results"] if "plain draw" in each["case"]["measure"]]
    assert [each["median"] for each in equal] == [100.0] * (EACH * 3)
    assert {each["against"] for each in written["ratios"]} == {NAIVE}
    assert len(written["ratios"]) == len(times) - EACH * 3


def test_an_interpreter_without_vllm_is_one_clear_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if _has_vllm(sys.executable):
        pytest.skip("this environment has vLLM")
    assert sampler.run(parse("--vllm-python", sys.executable)) == 1
    assert "No module named 'vllm'" in capsys.readouterr().err


VLLM_PYTHON = os.environ.get("LEXSHARD_VLLM_PYTHON", "")


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmSamplers]:
    with VllmSamplers(Path(VLLM_PYTHON), (0,), 1) as process:
        yield process


@pytest.mark.slow
@pytest.mark.skipif(not VLLM_PYTHON, reason="LEXSHARD_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("name", SAMPLED)
def test_vllm_itself_keeps_the_ports_sets(pool: Pool, vllm: VllmSamplers, name: str) -> None:
    workload = workload_of(pool, SETTINGS[name], batch=40)
    vllm.open(workload)
    port = TorchSamplers(workload)
    for step in range(3):
        assert np.array_equal(vllm.kept(), port.kept(step))
        assert len(vllm.take(range(1))) == 1
        port.take(range(step, step + 1))


def _has_vllm(python: str) -> bool:
    return subprocess.run([python, "-c", "import vllm"], capture_output=True).returncode == 0
