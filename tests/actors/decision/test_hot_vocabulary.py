"""A hot vocabulary at run time: it follows its use, its file is checked, its command works."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings

from lexshard.actors.decision.hot_vocabulary import (
    HotFile,
    HotVocabulary,
    read_hot_file,
    synthetic_decide,
    tokenizer_hash,
    vocabulary,
    write_hot_file,
)
from lexshard.actors.decision.hot_vocabulary.file import About, MixPart
from lexshard.actors.decision.hot_vocabulary.report import write_report
from lexshard.actors.decision.hot_vocabulary.traces import read_traces
from lexshard.kernels.hot_vocab import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    interpolate,
    skip_rate,
)
from tests.support.manual_clock import ManualClock
from tests.support.paths import DEMO

settings.register_profile("hot_vocabulary", deadline=None)
settings.load_profile("hot_vocabulary")

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]


VOCABULARY = 16_384
COST = Cost(2e-6, 2e-9)
SIZES = np.array([0, *np.geomspace(64, VOCABULARY, 11).round()], np.int64)


class World:
    """Rows that visit the whole tail when their token is not hot, as the paper's mixture does.

    The tokens' frequencies follow Zipf's law; ``shift`` says how many tokens nobody asks for come
    before the most frequent one in the hot vocabulary's own order (V: nothing is ever hit).
    """

    def __init__(self, seed: int = 0, cost: Cost = COST) -> None:
        self._random = np.random.default_rng(seed)
        self._cost = cost
        self.ids = self._random.permutation(VOCABULARY).astype(np.int32)

    def hot_vocabulary(self) -> HotVocabulary:
        curve = Curve(SIZES, self.hit_rate(0)[SIZES])
        return HotVocabulary(self.ids, VOCABULARY, curve, self._cost)

    def hit_rate(self, shift: int) -> Floats:
        """By the number of hot tokens, 0 to V."""
        weights = 1.0 / (1.0 + np.arange(VOCABULARY)) ** 1.2
        moved = np.concatenate([np.zeros(shift), weights])[:VOCABULARY]
        return np.concatenate([[0.0], np.cumsum(moved) / weights.sum()])

    def best_cost(self, shift: int) -> float:
        sizes = np.arange(VOCABULARY + 1)
        return float(expected_cost(sizes, self.hit_rate(shift), self._cost, VOCABULARY).min())

    def cost_of(self, size: int, shift: int) -> float:
        rate = self.hit_rate(shift)[[size]]
        return float(expected_cost(np.array([size]), rate, self._cost, VOCABULARY)[0])

    def run(self, hot: HotVocabulary, rows: int, shift: int, slowness: float = 1.0) -> None:
        for _ in range(rows // 8):
            missed = self._random.random(8) > self.hit_rate(shift)[hot.size]
            visited = int(missed.sum()) * (VOCABULARY - hot.size)
            seconds = 8 * self._cost.fixed + self._cost.per_token * (8 * hot.size + visited)
            seconds += 8 * self._cost.two_goes * (hot.size > 0)
            noise = self._random.uniform(0.9, 1.2) * (100 if self._random.random() < 0.01 else 1)
            hot.observe(visited, 8, slowness * seconds * noise)


def test_a_hot_vocabulary_follows_its_use_and_comes_back() -> None:
    """The domain moves to tokens that were rare: the set grows. It moves back: it shrinks. Within
    10,000 rows the size costs at most 15% more than the best of all sizes there."""
    world = World()
    hot = world.hot_vocabulary()
    at_first = hot.size
    assert 0 < at_first < 4000
    world.run(hot, 10_000, shift=0)
    assert world.cost_of(hot.size, 0) <= 1.15 * world.best_cost(0)
    world.run(hot, 10_000, shift=4000)
    assert hot.size > 4000
    assert world.cost_of(hot.size, 4000) <= 1.15 * world.best_cost(4000)
    world.run(hot, 60_000, shift=0)
    assert hot.size < 4000
    assert world.cost_of(hot.size, 0) <= 1.15 * world.best_cost(0)


def test_a_hot_vocabulary_switches_itself_off_where_it_does_not_pay() -> None:
    """Nothing is ever hit, and looking in two goes costs: off, but for a trial now and then.
    Familiar rows bring it back."""
    world = World(1, COST._replace(two_goes=5e-6))
    hot = world.hot_vocabulary()
    assert hot.size > 0
    strange = VOCABULARY
    world.run(hot, 20_000, shift=strange)
    off = 0
    for _ in range(100):
        world.run(hot, 256, shift=strange)
        off += hot.size == 0
        assert (hot.hot_ids is None) == (len(hot.ids) == 0) == (hot.size == 0)
    assert off > 80
    world.run(hot, 60_000, shift=0)
    assert world.cost_of(hot.size, 0) <= 1.15 * world.best_cost(0)


def test_a_size_that_pays_is_kept_while_nothing_changes() -> None:
    """Noise and interrupted steps move nothing: the size of the traces stays for 50,000 rows."""
    world = World(2)
    hot = world.hot_vocabulary()
    sizes = set()
    for _ in range(50):
        world.run(hot, 1000, shift=0)
        sizes.add(hot.size)
    costs = [world.cost_of(size, 0) for size in sizes]
    assert max(costs) <= 1.1 * world.best_cost(0)


def test_the_live_cost_follows_the_machine() -> None:
    world = World(3)
    hot = world.hot_vocabulary()
    world.run(hot, 20_000, shift=0, slowness=3.0)
    size = np.array([hot.size])
    predicted = expected_cost(size, interpolate(hot.curve, size), hot.cost, VOCABULARY)
    assert predicted[0] == pytest.approx(3.15 * world.cost_of(hot.size, 0), rel=0.25)


def test_block_maxima_that_leave_little_switch_hot_tokens_off() -> None:
    """Where 300 tokens are visited without any hot ones, none pays: honest, and not 64 either."""
    visited = np.maximum(300.0 - 0.5 * SIZES, 0.0)
    curve = Curve(SIZES, skip_rate(SIZES, visited, VOCABULARY))
    assert HotVocabulary(World().ids, VOCABULARY, curve, COST).size == 0


def test_calibration_takes_the_cost_from_timings_and_stops_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock(monkeypatch, vocabulary)
    world = World(4)
    hot = world.hot_vocabulary()
    rates = world.hit_rate(0)
    calls = 0

    def decide(hot_ids: Ids) -> npt.NDArray[np.int64]:
        assert (np.diff(hot_ids) > 0).all()
        visited = (1 - rates[len(hot_ids)]) * (VOCABULARY - len(hot_ids))
        clock.sleep(4 * (50e-6 + 20e-9 * (len(hot_ids) + visited)))
        nonlocal calls
        calls += 1
        return np.full(4, round(visited))

    cost = hot.calibrate(decide, seconds=0.2)
    assert 0.2 <= clock.perf_counter() < 0.25
    assert calls > 20
    assert cost.fixed + cost.two_goes == pytest.approx(50e-6, rel=0.05)
    assert cost.per_token == pytest.approx(20e-9, rel=0.05)
    assert hot.cost == cost


def test_the_real_decision_calibrates() -> None:
    """With the kernel that serves: a cost of every kind."""
    world = World(6)
    hot = world.hot_vocabulary()
    decide = synthetic_decide(VOCABULARY)
    decide(hot.ids)  # compiled
    cost = hot.calibrate(decide, seconds=0.1)
    assert min(cost) >= 0
    assert 0 < cost.fixed + cost.per_token * VOCABULARY < 1e-2


def test_observing_is_cheap() -> None:
    """It runs beside decisions of 100 microseconds a row: under 5 a row, the refits included."""
    world = World(5)
    hot = world.hot_vocabulary()
    quickest = np.inf
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(64):
            hot.observe(8 * 1000, 8, 2e-5)
        quickest = min(quickest, (time.perf_counter() - started) / 512)
    assert quickest < 5e-6


def test_hot_ids_must_be_ids() -> None:
    curve = Curve(SIZES, World().hit_rate(0)[SIZES])
    for ids in ([1, 1, 2], [-1, 2], [0, VOCABULARY]):
        with pytest.raises(ValueError, match="distinct ids"):
            HotVocabulary(np.array(ids, np.int32), VOCABULARY, curve, COST)


# -- the file ---------------------------------------------------------------------------------


def some_file(ids: Ids, shift: int = 0) -> HotFile:
    size = len(ids)
    sizes = np.minimum(SIZES[:9], size)
    visited = (1 - World().hit_rate(shift)[sizes]) * (size - sizes)
    about = About(
        model="some-model",
        vocabulary_size=size,
        tokenizer="0" * 64,
        traces=("talk.jsonl",),
        counted_tokens=1000,
        generated_tokens=0,
        positions=64,
        seed=0,
        sizes=tuple(sizes.tolist()),
        hit_rate=tuple(World().hit_rate(shift)[sizes].tolist()),
        mix=(MixPart("greedy", tuple(visited.tolist()), tuple((1e-9 * visited).tolist())),),
        cost=COST,
    )
    return HotFile(ids, about)


def test_a_file_comes_back_as_it_was_and_has_always_the_same_bytes(tmp_path: Path) -> None:
    written = some_file(World().ids)
    write_hot_file(tmp_path / "a.lexshard", written)
    write_hot_file(tmp_path / "b.lexshard", written)
    assert (tmp_path / "a.lexshard").read_bytes() == (tmp_path / "b.lexshard").read_bytes()
    read = read_hot_file(tmp_path / "a.lexshard", VOCABULARY, "0" * 64)
    assert read.about == written.about
    assert np.array_equal(read.ids, written.ids)
    assert read.cost == COST
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.lexshard", "b.lexshard"]


def test_files_that_do_not_fit_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "hot.lexshard"
    again = "lexshard hotset build"
    with pytest.raises(ValueError, match=f"no hot vocabulary at.*{again}"):
        read_hot_file(path)
    write_hot_file(path, some_file(World().ids))
    with pytest.raises(ValueError, match=f"16,384 tokens.*this model has 32,000.*{again}"):
        HotVocabulary.load(path, 32_000)
    with pytest.raises(ValueError, match=f"another tokenizer.*{again}"):
        HotVocabulary.load(path, VOCABULARY, "1" * 64)
    whole = path.read_bytes()
    changed = whole.replace(b"talk.jsonl", b"walk.jsonl")
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), changed, whole[:100], b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"hot\.lexshard.*hotset build"):
            HotVocabulary.load(path, VOCABULARY)


def test_a_changed_file_is_read_again_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "hot.lexshard"
    write_hot_file(path, some_file(World(0).ids))
    hot = HotVocabulary.load(path, VOCABULARY)
    assert not hot.reload_if_changed()
    before = hot.ids
    write_hot_file(path, some_file(World(9).ids, shift=2000))
    assert hot.reload_if_changed()
    assert hot.size > 2000
    assert not np.array_equal(hot.ids[: len(before)], before)
    assert not hot.reload_if_changed()

    kept = hot.ids
    write_hot_file(path, some_file(np.arange(100, dtype=np.int32)))
    with pytest.raises(ValueError, match="100 tokens"):
        hot.reload_if_changed()
    assert not hot.reload_if_changed()  # said once; the old content stays
    assert np.array_equal(hot.ids, kept)
    path.unlink()
    assert not hot.reload_if_changed()


# -- traces and the command -------------------------------------------------------------------


def test_traces_are_read_in_every_form(tmp_path: Path, demo_tokenizer: object) -> None:
    lines = [
        {"token_ids": [5, 6, 7]},
        {"text": "Once upon a time"},
        {"prompt": "Once upon a time"},
        {"prompt": [8, 9]},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    plain = tmp_path / "story.txt"
    plain.write_text("Once upon a time\n\n\nThe end.\n")
    traces = read_traces([path, plain], demo_tokenizer, VOCABULARY)
    assert traces.sources == ("talk.jsonl", "story.txt")
    assert len(traces.texts) == 7
    assert traces.texts[0] == (5, 6, 7)
    assert traces.texts[1] == traces.texts[2] == traces.texts[5]
    assert traces.texts[3] == (8, 9)

    for bad, message in (
        ("{", "line 1 is not JSON"),
        ('{"question": "?"}', "line 1 has none of"),
        ('{"prompt": 3}', "neither text nor token ids"),
        ('{"messages": "Hi"}', "messages need"),
        ('{"token_ids": [16384]}', "another model"),
        ("", "no text in"),
    ):
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_traces([path], demo_tokenizer, VOCABULARY)
    with pytest.raises(ValueError, match="no tokenizer"):
        read_traces([plain], None, VOCABULARY)


def test_the_command_builds_shows_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: list[str]
) -> None:
    from lexshard.serve_app.cli import main

    talk = tmp_path / "talk.jsonl"
    talk.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts[:12]))
    out, report = tmp_path / "hot.lexshard", tmp_path / "report.json"
    build = ["hotset", "build", str(DEMO), "--traces", str(talk), "--out", str(out)]
    few = ["--positions", "16", "--generate", "4", "--threads", "1"]
    assert main([*build, *few, "--report", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "optimum: H = " in printed

    hot = HotVocabulary.load(out, VOCABULARY, tokenizer_hash(DEMO))
    file = read_hot_file(out)
    assert sorted(file.ids.tolist()) == list(range(VOCABULARY))
    assert file.about.positions == 16
    assert file.about.generated_tokens > 0
    assert file.about.hit_rate[0] == 0.0
    assert file.about.hit_rate[-1] == pytest.approx(1.0)
    assert (np.diff(file.about.hit_rate) >= 0).all()
    assert file.visited[-1] == 0  # the whole vocabulary is hot: there is no tail
    assert hot.size in (0, *file.about.sizes, best_size(file.curve, COST, VOCABULARY))

    content = json.loads(report.read_text())
    assert content["about"] == json.loads(msgspec.json.encode(file.about))
    assert len(content["seconds_measured"]) == len(content["sizes"])
    page = tmp_path / "report.html"
    write_report(page, file)
    assert page.read_text().count("<svg") == 3

    assert main(["hotset", "show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in printed
    assert main(["hotset", "show", str(talk)]) == 2
    assert main([*build, "--report", "plot.png"]) == 2
    assert main(["hotset", "build", str(DEMO), "--traces", "nowhere.txt"]) == 2
    assert "no traces at nowhere.txt" in capsys.readouterr().err
