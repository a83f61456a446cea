"""What all benches share: turns, ratios, the table, the file, the exit status."""

from __future__ import annotations

import argparse
import json
import os
from datetime import date
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.loadtest.bench.frame import add_common_arguments, in_turns, run_bench
from lexshard.loadtest.bench.machine import pinned_to_cores
from lexshard.loadtest.bench.record import Measure, Report, format_number, paired_ratio

SECONDS = Measure("latency", "s", higher_is_better=False)
positive = st.floats(min_value=1e-3, max_value=1e6)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=9))
def test_a_ratio_says_better_whichever_direction_is_better(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = zip(*pairs, strict=True)
    higher = paired_ratio(ours, theirs, higher_is_better=True)
    lower = paired_ratio(theirs, ours, higher_is_better=False)
    assert higher == lower
    assert min(a / b for a, b in pairs) <= higher <= max(a / b for a, b in pairs) * (1 + 1e-12)


def test_a_slow_minute_does_not_move_the_ratio_of_runs_that_were_side_by_side() -> None:
    assert paired_ratio([100, 10, 100], [50, 5, 50], higher_is_better=True) == 2.0
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratio([1.0, 2.0], [1.0], higher_is_better=True)


def test_sides_take_turns_and_runs_that_warm_up_do_not_count() -> None:
    calls: list[tuple[str, int]] = []

    def note(name: str, turn: int) -> int:
        calls.append((name, turn))
        return turn

    found = in_turns({name: partial(note, name) for name in "ab"}, 2, warm_up=1)
    assert found == {"a": [0, 1], "b": [0, 1]}
    assert calls == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_pinning_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    with pinned_to_cores(1) as cores:
        assert os.sched_getaffinity(0) == set(cores)
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ValueError, match="--threads"), pinned_to_cores(10**6):
        pass


def test_json_has_exactly_the_agreed_fields(tmp_path: Path) -> None:
    report = Report({"cores": 2}, {"python": "3"}, "lexshard bench engine", seed=17)
    raw = {"lexshard": [1.0, 2.0], "peer": [3.0, 4.0]}
    report.add({"requests": 4}, SECONDS, raw, ours="lexshard")
    report.write(tmp_path / "deep" / "report.json")
    written = json.loads((tmp_path / "deep" / "report.json").read_text())
    case = {"requests": 4, "measure": "latency"}
    assert written == {
        "machine": {"cores": 2},
        "versions": {"python": "3"},
        "date": date.today().isoformat(),
        "command": "lexshard bench engine",
        "seed": 17,
        "results": [
            {
                "case": case,
                "name": name,
                "unit": "s",
                "median": pytest.approx(values[0] + 0.5),
                "p10": pytest.approx(values[0] + 0.1),
                "p90": pytest.approx(values[0] + 0.9),
                "runs": 2,
                "raw": values,
            }
            for name, values in raw.items()
        ],
        "ratios": [{"case": case, "against": "peer", "ratio": 2.5}],
    }


def test_the_table_has_a_line_for_every_name_and_the_ratio_beside_the_peer() -> None:
    report = Report({}, {}, "", seed=17)
    for requests in (1, 16):
        raw = {"lexshard": [1.0], "peer": [float(requests)]}
        report.add({"dtype": "float32", "requests": requests}, SECONDS, raw, ours="lexshard")
    heading, headers, _, *lines = report.table().splitlines()
    assert heading == "dtype float32"
    assert headers.split() == ["requests", "of", "latency,", "s"]
    assert [line.split() for line in lines] == [
        ["1", "lexshard", "1.00"],
        ["1", "peer", "1.00", "(1.00x)"],
        ["16", "lexshard", "1.00"],
        ["16", "peer", "16.0", "(16.00x)"],
    ]
    told = [format_number(value) for value in (0.0, 0.00801, 0.25, 12.3, 1234.5)]
    assert told == ["0", "0.00801", "0.25", "12.3", "1,234"]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_common_arguments(parser, runs=5, quick_runs=2, seed=3)
    return parser.parse_args(words)


def test_what_was_measured_before_a_failure_is_told_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"

    def measure(report: Report, arguments: argparse.Namespace) -> int:
        report.add({"runs": arguments.runs}, SECONDS, {"a": [1.0]})
        raise RuntimeError("the peer is gone")

    assert run_bench("x", options("--quick", "--json", str(path)), measure) == 1
    said = capsys.readouterr()
    assert "lexshard bench x: the peer is gone" in said.err
    assert "runs 2" in said.out
    assert json.loads(path.read_text())["results"][0]["case"]["runs"] == 2


def test_what_came_out_wrong_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench("x", options(), lambda *_: 3, checked="tokens") == 1
    assert "3 tokens are wrong" in capsys.readouterr().err
    assert run_bench("x", options("--runs", "1"), lambda *_: 0) == 0
