"""``lexshard bench head``: heads are what they say, every contender decides the same rows, and the
certified tokens are compared with canonical ones."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.kernels.rows import canonical_logits
from lexshard.loadtest.bench import cluster_bounds, head, machine
from lexshard.loadtest.bench.contenders.head import OURS, choose, head_contenders
from lexshard.loadtest.bench.options import head as head_options
from lexshard.loadtest.bench.options.head import TIERS
from lexshard.loadtest.bench.synthetic.head_workload import (
    SAMPLING_METHODS,
    HeadWorkload,
    SamplingMethod,
    controls,
    needs,
    synthetic_workload,
)
from lexshard.loadtest.bench.synthetic.heads import (
    NAMED,
    Geometry,
    measure_geometry,
    synthetic_head,
    synthetic_hidden,
)
from lexshard.loadtest.bench.synthetic.random_model import DEMO


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_seed_decides_every_bit_of_a_head(name: str, dtype: torch.dtype) -> None:
    first, again, other = (
        synthetic_head(NAMED[name], 300, 128, dtype=dtype, seed=seed) for seed in (5, 5, 6)
    )
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert first.weight.dtype == dtype
    assert torch.equal(synthetic_hidden(first, 7, seed=1), synthetic_hidden(again, 7, seed=1))


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.9, 0.98])
def test_rows_of_one_cluster_have_the_cosine_that_was_asked_for(cosine: float) -> None:
    made = synthetic_head(Geometry(cosine=cosine), 1024, 512, dtype=torch.float32, seed=2)
    unit = made.weight / made.weight.norm(dim=1, keepdim=True)
    same = unit[:64] @ unit[:64].T
    pairs = same[~torch.eye(64, dtype=torch.bool)]
    assert float(pairs.mean()) == pytest.approx(cosine, abs=0.05)
    assert abs(float((unit[:64] @ unit[64:].T).mean())) < 0.05


def test_row_norms_are_one_on_average_and_heavy_tails_reach_further() -> None:
    plain = synthetic_head(NAMED["independent"], 4096, 256, seed=3).weight.float().norm(dim=1)
    heavy = synthetic_head(NAMED["heavy-tailed"], 4096, 256, seed=3).weight.float().norm(dim=1)
    assert float(plain.mean()) == pytest.approx(1.0, abs=0.02)
    assert float(heavy.mean()) == pytest.approx(1.0, abs=0.02)
    assert heavy.max() > 1.3 * plain.max()


def test_hidden_states_have_the_length_and_the_logits_that_were_asked_for() -> None:
    geometry = Geometry(flat_share=0.25)
    made = synthetic_head(geometry, 4096, 1024, dtype=torch.float32, seed=4)
    hidden = synthetic_hidden(made, 16, seed=5)
    assert hidden.norm(dim=1).numpy() == pytest.approx(geometry.size * 32, rel=1e-5)
    best = (hidden @ made.weight.T).amax(dim=1)
    assert int((best < geometry.best - 1).sum()) == 4
    assert float(best.max()) == pytest.approx(geometry.best, abs=1e-3)


def test_outlier_channels_change_hidden_states_but_not_logits() -> None:
    plain, outlying = (
        synthetic_head(Geometry(outlier_channels=count), 512, 256, dtype=torch.float32, seed=6)
        for count in (0, 4)
    )
    assert len(outlying.outliers) == 4
    hidden, wild = (synthetic_hidden(each, 8, seed=7) for each in (plain, outlying))
    ratio = wild.abs().amax(dim=1) / hidden.abs().amax(dim=1)
    assert float(ratio.median()) > 3
    expected = hidden.double() @ plain.weight.double().T
    assert torch.allclose(wild.double() @ outlying.weight.double().T, expected, atol=1e-3)


def test_what_is_reported_of_a_head_is_measured_on_it() -> None:
    weight = torch.zeros(100, 4)
    weight[:, 0] = torch.arange(100)
    found = measure_geometry(weight, torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
    assert (found.best, found.fiftieth, found.hidden_norm) == (198.0, 100.0, 2.0)
    assert (found.smallest_gap, found.largest_row_norm) == (98.0, 99.0)


@pytest.mark.parametrize(("geometry", "rows"), [(Geometry(cosine=1.5), 512), (Geometry(), 63)])
def test_impossible_heads_are_refused(geometry: Geometry, rows: int) -> None:
    with pytest.raises(ValueError):
        synthetic_head(geometry, rows, 128)


# -- contenders -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workload() -> HeadWorkload:
    return synthetic_workload("independent", 2000, 128, torch.bfloat16, seed=8)


def test_calibration_and_measurement_share_no_hidden_state(workload: HeadWorkload) -> None:
    measured = {state.tobytes() for state in workload.hidden}
    assert measured.isdisjoint(state.tobytes() for state in workload.calibration)


@pytest.mark.parametrize("tier", [*TIERS, "dense"])
@pytest.mark.parametrize("name", SAMPLING_METHODS)
def test_certified_tokens_are_those_of_all_canonical_logits(
    workload: HeadWorkload, tier: str, name: str
) -> None:
    ours = head_contenders(workload, tier, 3)[OURS]
    for number in range(4):
        step = head.step_of(workload, SAMPLING_METHODS[name], 3, number)
        output = ours.answer(step)
        assert np.array_equal(output.tokens, head.canonical_tokens(workload, step))
        assert len(output.certificates) == 3


@pytest.mark.parametrize("name", SAMPLING_METHODS)
def test_a_need_and_its_controls_ask_for_the_same_draw(name: str) -> None:
    method = SAMPLING_METHODS[name]
    for row, need in enumerate(needs(method, 3, step=9)):
        asked = controls(method, 3, step=9)
        assert (need.key, need.position) in {(row, 9), (0, 0)}
        assert need.inverse_temperature == asked.inverse_temperature[row]
        assert need.k == asked.top_k[row]
        assert asked.log_min_p[row] == (math.log(need.min_p) if need.min_p else -math.inf)


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (SAMPLING_METHODS["gumbel"], 5),
        (SamplingMethod("top3", SAMPLING_METHODS["top50"].need, top_k=3), 3),
    ],
)
def test_the_peers_draw_follows_the_softmax(method: SamplingMethod, kept: int) -> None:
    """Chi-square over 20,000 draws; false alarm below 1e-6 (4 degrees of freedom: 33.4)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    draws = choose(logits.repeat(20_000, 1), method, torch.Generator().manual_seed(9))
    shares = logits[:kept].softmax(dim=0)
    counts = torch.bincount(draws, minlength=5)
    assert int(counts[kept:].sum()) == 0
    expected = 20_000 * shares
    assert float(((counts[:kept] - expected) ** 2 / expected).sum()) < 33.4


# -- the command ----------------------------------------------------------------------------------


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    head_options.add_arguments(parser)
    return parser.parse_args(options)


SMALL = ("-V", "1024", "-d", "128", "--batch", "1,3", "--runs", "2")


@pytest.mark.parametrize("tier", ["auto", "int8"])
def test_a_run_writes_times_certificates_and_ratios(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 22)
    path = tmp_path / "head.json"
    needs_ = "greedy,gumbel,top50,minp"
    assert head.run(parse(*SMALL, "--need", needs_, "--tier", tier, "--json", str(path))) == 0
    printed = capsys.readouterr().out
    assert "equal to those of all canonical logits: 32 of 32" in printed
    written = json.loads(path.read_text())
    assert set(written) == {"machine", "versions", "command", "seed", "results", "ratios"}
    times = [each for each in written["results"] if each["case"]["measure"] == "time"]
    assert {each["name"] for each in times} == {
        "certified",
        "own dense",
        "row kernel",
        "torch fp32",
        "torch bf16",
    }
    assert len(times) == 2 * 4 * 5
    assert all(each["runs"] == 2 and each["median"] > 0 for each in times)
    equal = [each for each in written["results"] if "equal" in each["case"]["measure"]]
    assert [each["median"] for each in equal] == [100.0] * 8
    assert {each["against"] for each in written["ratios"]} == {each["name"] for each in times} - {
        "certified"
    }


def test_a_wrong_token_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 22)
    original = canonical_logits

    def shifted(*arguments: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return -original(*arguments)

    monkeypatch.setattr(head, "canonical_logits", shifted)
    assert head.run(parse(*SMALL, "--need", "greedy", "--tier", "int8")) == 1
    captured = capsys.readouterr()
    assert "8 certified tokens are wrong" in captured.err
    assert "canonical logits: 0 of 8" in captured.out


@pytest.mark.parametrize("wrong", [("--batch", "0"), ("--need", "beam"), ("--tier", "int3")])
def test_wrong_options_are_refused(wrong: Sequence[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*wrong)


def test_a_model_that_is_not_there_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ARRAY_BYTES", 1 << 22)
    assert head.run(parse("--model", str(tmp_path / "absent"))) == 1
    assert "lexshard bench head:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_on_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.json"
    assert head.run(parse("--quick", "--model", str(DEMO), "--json", str(path))) == 0
    assert "123 of 123" in capsys.readouterr().out


# -- the paper's bounds ---------------------------------------------------------------------------


def _opened(cosine: float) -> float:
    """Mean opened share for greedy tokens with the better of both bounds."""
    made = synthetic_head(Geometry(cosine=cosine, flat_share=0.0), 4096, 256, seed=10)
    hidden = synthetic_hidden(made, 8, seed=11).numpy()
    workload = HeadWorkload("test", made.weight, None, 1.0, None, hidden, hidden)
    for setting, clusters in cluster_bounds._settings(workload, [1 / 64], seed=0):
        if setting.clustering == "euclidean" and setting.bounds == "best":
            decide = cluster_bounds._paper_head(workload, clusters, setting)
            found = decide(hidden, [cluster_bounds.NEEDS["greedy"]] * 8).certificates
            return sum(each.opened_share for each in found) / len(found)
    raise AssertionError("no such bound")


def test_clusters_prune_where_their_rows_are_alike_and_nowhere_else() -> None:
    pytest.importorskip("faiss")
    independent = _opened(0.0)
    assert independent > 0.9
    assert _opened(0.98) < 0.6 * independent


@pytest.mark.slow
def test_the_papers_ablation_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(cluster_bounds, "QUICK_COSINES", (0.98,))
    path = tmp_path / "paper.json"
    assert head.run(parse("--paper", "--quick", "-V", "2048", "-d", "64", "--json", str(path))) == 0
    assert "int8 ladder" in capsys.readouterr().out
    measures = {each["case"]["measure"] for each in json.loads(path.read_text())["results"]}
    assert measures == {"opened", "certified within K_max", "fallback", "tightness xi"}
