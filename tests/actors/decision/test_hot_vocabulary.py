"""A hot vocabulary: its size follows the cost model, its file is checked, its commands work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lexshard.actors.decision.build import hot_ids
from lexshard.actors.decision.hot_vocabulary import file, sizes
from lexshard.actors.decision.hot_vocabulary.file import (
    KIND,
    About,
    HotFile,
    read_hot_file,
    tokenizer_hash,
    write_hot_file,
)
from lexshard.actors.decision.hot_vocabulary.sizes import (
    calibrate,
    size_that_pays,
    synthetic_decider,
)
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.kernels.hot_vocab import Cost, Curve, expected_cost, skip_rate
from tests.support.manual_clock import ManualClock
from tests.support.paths import DEMO

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

VOCABULARY = 16_384
COST = Cost(2e-6, 2e-9)
SIZES = np.array([0, *np.geomspace(64, VOCABULARY, 11).round()], np.int64)
IDS = np.random.default_rng(0).permutation(VOCABULARY).astype(np.int32)


def hit_rate() -> Floats:
    """Zipf's law by the number of hot tokens, 0 to V; a row that is not hit visits all others."""
    weights = 1.0 / (1.0 + np.arange(VOCABULARY)) ** 1.2
    return np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])


def test_the_size_is_within_a_percent_of_the_best_of_all() -> None:
    every = np.arange(VOCABULARY + 1)
    best = expected_cost(every, hit_rate(), COST, VOCABULARY).min()
    size = size_that_pays(Curve(SIZES, hit_rate()[SIZES]), COST, VOCABULARY)
    found = expected_cost(np.array([size]), hit_rate()[[size]], COST, VOCABULARY)[0]
    assert 0 < size < 4000
    assert found <= 1.01 * best


def test_block_maxima_that_leave_little_switch_hot_tokens_off() -> None:
    """Where 300 tokens are visited without any hot ones, none pays: honest, and not 64 either."""
    visited = np.maximum(300.0 - 0.5 * SIZES, 0.0)
    curve = Curve(SIZES, skip_rate(SIZES, visited, VOCABULARY))
    assert size_that_pays(curve, COST, VOCABULARY) == 0


def test_calibration_takes_the_cost_from_timings_and_stops_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock(monkeypatch, sizes)
    rates = hit_rate()
    calls = 0

    def decide(hot: Ids) -> npt.NDArray[np.int64]:
        assert (np.diff(hot) > 0).all()
        visited = (1 - rates[len(hot)]) * (VOCABULARY - len(hot))
        clock.sleep(4 * (50e-6 + 20e-9 * (len(hot) + visited)))
        nonlocal calls
        calls += 1
        return np.full(4, round(visited))

    cost = calibrate(decide, IDS, SIZES)
    assert 0.3 <= clock.perf_counter() < 0.35
    assert calls > 20
    assert cost.fixed + cost.two_goes == pytest.approx(50e-6, rel=0.05)
    assert cost.per_token == pytest.approx(20e-9, rel=0.05)


def test_the_decision_that_serves_calibrates() -> None:
    cost = calibrate(synthetic_decider(VOCABULARY), IDS, SIZES)
    assert min(cost) >= 0
    assert 0 < cost.fixed + cost.per_token * VOCABULARY < 1e-2
    few = np.array([0, 64])  # a vocabulary of one block: every size visits everything
    assert min(calibrate(synthetic_decider(64), np.arange(64, dtype=np.int32), few)) >= 0


# -- the file ---------------------------------------------------------------------------------


def some_file(ids: Ids) -> HotFile:
    size = len(ids)
    some = np.minimum(SIZES[:9], size)
    visited = (1 - hit_rate()[some]) * (size - some)
    seconds = expected_cost(some, skip_rate(some, visited, size), COST, size)
    about = About(
        model="some-model",
        vocabulary_size=size,
        tokenizer="0" * 64,
        traces=("talk.jsonl",),
        counted_tokens=1000,
        generated_tokens=0,
        positions=64,
        seed=0,
        sizes=tuple(some.tolist()),
        visited=tuple(visited.tolist()),
        seconds=tuple(seconds.tolist()),
    )
    return HotFile(ids, about)


def test_a_file_comes_back_as_it_was_and_has_always_the_same_bytes(tmp_path: Path) -> None:
    written = some_file(IDS)
    write_hot_file(tmp_path / "a.lexshard", written)
    write_hot_file(tmp_path / "b.lexshard", written)
    assert (tmp_path / "a.lexshard").read_bytes() == (tmp_path / "b.lexshard").read_bytes()
    read = read_hot_file(tmp_path / "a.lexshard", VOCABULARY, "0" * 64)
    assert read.about == written.about
    assert np.array_equal(read.ids, written.ids)
    assert read.cost == pytest.approx(COST, rel=1e-6, abs=1e-12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.lexshard", "b.lexshard"]


def test_files_that_do_not_fit_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot.lexshard"
    again = "lexshard hotset build"
    with pytest.raises(ValueError, match=f"no hot vocabulary at.*{again}"):
        read_hot_file(path)
    write_hot_file(path, some_file(IDS))
    with pytest.raises(ValueError, match=f"16,384 tokens.*this model has 32,000.*{again}"):
        read_hot_file(path, 32_000)
    with pytest.raises(ValueError, match=f"another tokenizer.*{again}"):
        read_hot_file(path, VOCABULARY, "1" * 64)
    with monkeypatch.context() as yesterday:
        yesterday.setattr(file, "KIND", replace(KIND, format=1))
        write_hot_file(tmp_path / "old", some_file(IDS))
    with pytest.raises(ValueError, match=f"format 1, this version reads 2.*{again}"):
        read_hot_file(tmp_path / "old")
    whole = path.read_bytes()
    changed = whole.replace(b"talk.jsonl", b"walk.jsonl")
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), changed, whole[:100], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"hot\.lexshard.*hotset build"):
            read_hot_file(path, VOCABULARY)


def test_a_sampler_takes_as_many_as_pay_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot.lexshard"
    write_hot_file(path, some_file(IDS))
    settings = SamplerSettings(VOCABULARY, (0,), hot_vocabulary=str(path))
    monkeypatch.setattr(sizes, "calibrate", lambda *_: COST)
    found = hot_ids(settings)
    assert found is not None
    assert np.array_equal(found, np.sort(IDS[: len(found)]))
    monkeypatch.setattr(sizes, "calibrate", lambda *_: Cost(2e-6, 2e-9, two_goes=1.0))
    assert hot_ids(settings) is None


# -- the commands -----------------------------------------------------------------------------


def test_the_commands_build_and_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: list[str]
) -> None:
    from lexshard.serve_app.cli import main

    talk = tmp_path / "talk.jsonl"
    talk.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts[:12]))
    out = tmp_path / "hot.lexshard"
    build = ["hotset", "build", str(DEMO), "--traces", str(talk), "--out", str(out)]
    assert main([*build, "--positions", "18", "--generate", "4", "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "optimum: H = " in printed

    hot = read_hot_file(out, VOCABULARY, tokenizer_hash(DEMO))
    assert sorted(hot.ids.tolist()) == list(range(VOCABULARY))
    assert hot.about.positions == 18
    assert hot.about.generated_tokens > 0
    assert hot.about.visited[-1] == 0  # the whole vocabulary is hot: there is no tail

    assert main(["hotset", "show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed
    assert main(["hotset", "show", str(talk)]) == 2
    assert main(["hotset", "build", str(DEMO), "--traces", "nowhere.txt"]) == 2
    assert "no traces at nowhere.txt" in capsys.readouterr().err
