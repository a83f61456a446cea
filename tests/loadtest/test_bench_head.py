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
from transformers import AutoTokenizer

from lexshard.actors.body.loading import load
from lexshard.actors.messages import Certificate
from lexshard.kernels.rows import canonical_logits
from lexshard.loadtest.bench import bandwidth
from lexshard.loadtest.bench.engine import command as engine
from lexshard.loadtest.bench.engine import options as engine_options
from lexshard.loadtest.bench.engine.random_model import DEMO, ModelDimensions, write_random_model
from lexshard.loadtest.bench.engine.runner import EngineRunner
from lexshard.loadtest.bench.head import case as head_case
from lexshard.loadtest.bench.head import cluster_bounds
from lexshard.loadtest.bench.head import command as head
from lexshard.loadtest.bench.head import options as head_options
from lexshard.loadtest.bench.head.case import HeadCase
from lexshard.loadtest.bench.head.contenders import (
    OURS,
    TIERS,
    HeadOutput,
    HeadStep,
    choose,
    cpu_contenders,
)
from lexshard.loadtest.bench.head.synthetic_heads import (
    NAMED,
    Geometry,
    measure_geometry,
    synthetic_head,
    synthetic_hidden,
)
from lexshard.loadtest.bench.head.workload import (
    SAMPLING_METHODS,
    HeadWorkload,
    SamplingMethod,
    controls,
    needs,
    synthetic_workload,
)
from lexshard.loadtest.bench.workload import Job

# -- synthetic heads ------------------------------------------------------------------------------


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
    case = HeadCase(workload, SAMPLING_METHODS[name], 3)
    case.take_turns(cpu_contenders(workload, tier, 3)[:1], runs=4)
    case.compare_with_canonical(4)
    assert (case.equal, case.compared) == (12, 12)
    assert len(case.certificates) == 12


def test_a_wrong_token_is_counted(workload: HeadWorkload) -> None:
    class Wrong:
        name = OURS

        def answer(self, step: HeadStep) -> HeadOutput:
            certificate = Certificate("top1", "deterministic", "none", 1, 1)
            return HeadOutput(np.full(len(step.hidden), -7), 1, (certificate,) * len(step.hidden))

    case = HeadCase(workload, SAMPLING_METHODS["greedy"], 2)
    case.take_turns([Wrong()], runs=3)
    case.compare_with_canonical(3)
    assert (case.equal, case.compared) == (0, 6)


def test_every_side_sees_the_same_steps_and_warm_up_does_not_count(workload: HeadWorkload) -> None:
    seen: dict[str, list[bytes]] = {"first": [], "second": []}

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def answer(self, step: HeadStep) -> HeadOutput:
            seen[self.name].append(step.hidden.tobytes())
            return HeadOutput(np.zeros(len(step.hidden), np.int64), 8)

    case = HeadCase(workload, SAMPLING_METHODS["gumbel"], 2)
    case.take_turns([Listener("first"), Listener("second")], runs=5)
    assert seen["first"] == seen["second"]
    assert len(set(seen["first"])) == 7
    assert {name: len(times) for name, times in case.milliseconds.items()} == dict.fromkeys(seen, 5)


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


def test_memory_bandwidth_is_a_plausible_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "ARRAY_BYTES", 1 << 22)
    assert 1e8 < bandwidth.read_bandwidth(2) < 1e13


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
    monkeypatch.setattr(bandwidth, "ARRAY_BYTES", 1 << 22)
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


def test_cuda_is_refused_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert head.run(parse("--device", "cuda")) == 1
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.json"
    assert head.run(parse(*SMALL, "--device", "cuda", "--json", str(path))) == 0
    assert "24 of 24" in capsys.readouterr().out


def test_a_wrong_token_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "ARRAY_BYTES", 1 << 22)
    original = canonical_logits

    def shifted(*arguments: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return -original(*arguments)

    monkeypatch.setattr(head_case, "canonical_logits", shifted)
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
    monkeypatch.setattr(bandwidth, "ARRAY_BYTES", 1 << 22)
    assert head.run(parse("--model", str(tmp_path / "absent"))) == 1
    assert "lexshard bench head:" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_on_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.json"
    assert head.run(parse("--quick", "--model", str(DEMO), "--json", str(path))) == 0
    assert "123 of 123" in capsys.readouterr().out


# -- the paper's bounds ---------------------------------------------------------------------------


def _opened(cosine: float, bounds: str) -> tuple[float, float]:
    """Mean opened share for greedy tokens, and the share certified within the budget."""
    made = synthetic_head(Geometry(cosine=cosine, flat_share=0.0), 4096, 256, seed=10)
    hidden = synthetic_hidden(made, 8, seed=11).numpy()
    workload = HeadWorkload("test", made.weight, None, 1.0, None, hidden, hidden)
    for setting, clusters in cluster_bounds._settings(workload, [1 / 64], seed=0):
        if setting.clustering == "euclidean" and setting.bounds == bounds:
            decide = cluster_bounds._paper_head(workload, clusters, setting)
            found = cluster_bounds._certificates(decide, hidden, cluster_bounds.NEEDS["greedy"])
            shares = [each.opened_share for each in found]
            return sum(shares) / len(shares), cluster_bounds._certified(found)
    raise AssertionError("no such bound")


def test_clusters_prune_where_their_rows_are_alike_and_nowhere_else() -> None:
    pytest.importorskip("faiss")
    independent, certified = _opened(0.0, "best")
    assert independent > 0.9
    assert certified == 0
    alike, _ = _opened(0.98, "best")
    assert alike < 0.6 * independent


def test_a_token_counts_as_certified_only_within_the_budget() -> None:
    shares = (0.1, 0.25, 0.26, 1.0)
    found = [Certificate("top1", "deterministic", "c", 1, 1, opened_share=s) for s in shares]
    assert cluster_bounds._certified(found) == 50.0


@pytest.mark.slow
def test_the_papers_ablation_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(cluster_bounds, "QUICK_COSINES", (0.98,))
    path = tmp_path / "paper.json"
    assert head.run(parse("--paper", "--quick", "-V", "2048", "-d", "64", "--json", str(path))) == 0
    printed = capsys.readouterr().out
    assert "one bias for all" in printed
    measures = {each["case"]["measure"] for each in json.loads(path.read_text())["results"]}
    assert measures == {"opened", "certified within K_max", "fallback", "tightness xi"}


# -- the random model -----------------------------------------------------------------------------

SMALL_DIMENSIONS = ModelDimensions(
    hidden=128, layers=6, vocabulary=20_000, intermediate=256, heads=2, kv_heads=1, head_dim=64
)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    write_random_model(folder, SMALL_DIMENSIONS, seed=12)
    return folder


def test_a_random_model_loads_with_every_row_of_its_vocabulary(random_model: Path) -> None:
    model = load(random_model, device="cpu")
    assert model.body.name == "fused"
    assert model.dtype == "bfloat16"
    assert model.vocabulary_size == SMALL_DIMENSIONS.vocabulary


def test_a_random_model_reads_text_as_the_demo_does(random_model: Path) -> None:
    mine, demo = (AutoTokenizer.from_pretrained(folder) for folder in (random_model, DEMO))
    text = "Once upon a time, in 1904, there was a letter."
    assert mine.encode(text) == demo.encode(text)
    assert len(mine) == SMALL_DIMENSIONS.vocabulary


def test_a_random_models_greedy_text_does_not_repeat_one_token(random_model: Path) -> None:
    runner = EngineRunner(str(random_model), "bfloat16", 1, "auto", "dense", name="test")
    (tokens,) = runner.run([Job((5, 6, 7), 48)]).token_ids
    assert len(set(tokens)) > 36


def test_a_random_models_logits_spread_like_a_trained_models(random_model: Path) -> None:
    model = load(random_model, device="cpu")
    generator = torch.Generator().manual_seed(13)
    size = math.sqrt(SMALL_DIMENSIONS.hidden)
    hidden = torch.nn.functional.normalize(
        torch.randn(8, SMALL_DIMENSIONS.hidden, generator=generator), dim=1
    )
    deviation = (hidden * size @ model.head.weight.float().T).std(dim=1)
    assert deviation.numpy() == pytest.approx(0.1 * size, rel=0.1)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 100 tokens"):
        write_random_model(tmp_path, ModelDimensions(vocabulary=100))
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        write_random_model(tmp_path, SMALL_DIMENSIONS, tokenizer=tmp_path / "absent")


def test_a_shape_is_written_to_a_folder_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Path] = []

    def write(folder: Path, *, seed: int) -> None:
        (folder / "model").touch()
        written.append(folder)

    monkeypatch.setattr(engine, "write_random_model", write)
    parser = argparse.ArgumentParser()
    engine_options.add_arguments(parser)
    arguments = parser.parse_args(["--shape", "large-vocabulary"])
    with engine.checkpoint(arguments) as model:
        assert written == [Path(model)]
        assert (arguments.requests, arguments.dtype) == ((1, 8), "bfloat16")
    assert not written[0].exists()
    plain = parser.parse_args([])
    with engine.checkpoint(plain) as model:
        assert (model, plain.requests, plain.dtype) == (plain.model, (1, 4, 16), "float32")
