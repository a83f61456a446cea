"""``lexshard bench head``: heads are what they say, every contender decides the same rows, and the
certified tokens are compared with canonical ones."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.kernels.rows import canonical_logits
from lexshard.loadtest.bench import head, machine
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
    synthetic_head,
    synthetic_hidden,
)


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


# -- contenders -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workload() -> HeadWorkload:
    return synthetic_workload("independent", 2000, 128, torch.bfloat16, seed=8)


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
