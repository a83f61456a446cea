"""``lexshard bench vllm-plugin`` with stand-ins for both of vLLM's processes."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from lexshard.loadtest.bench import vllm_plugin
from lexshard.loadtest.bench.frame import new_report
from lexshard.loadtest.bench.options.sampler import SETTINGS
from lexshard.loadtest.bench.options.vllm_plugin import add_arguments


class StandInProcess:
    """Steps of so many milliseconds; the greedy texts of every second request differ."""

    def __init__(self, milliseconds: float, shift: int, counts: str = "9 rows certified") -> None:
        self.versions = {"vllm": "0"}
        self.asked: list[dict[str, Any]] = []
        self._counts = counts
        self._seconds = milliseconds / 1e3
        self._shift = shift

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if "counts" in command:
            return {"counts": self._counts}
        self.asked.append(command)
        texts = [
            [ids[0] + (place % 2) * self._shift] for place, ids in enumerate(command["prompts"])
        ]
        return {"seconds": [self._seconds, 9.0, self._seconds], "token_ids": texts}


@pytest.fixture
def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--vllm-python", "python", "--runs", "3", "--steps", "5"])


def test_both_get_the_same_requests_and_neighbouring_runs_are_compared(
    arguments: argparse.Namespace,
) -> None:
    report = new_report(arguments.seed)
    ours, theirs = StandInProcess(2.0, 0), StandInProcess(3.0, 1)
    processes: Any = {vllm_plugin.ON: ours, vllm_plugin.WITHOUT: theirs}
    text = list(range(1000))
    for name in ("greedy", "all"):
        vllm_plugin.measure_case(report, processes, arguments, text, 4, SETTINGS[name])
    assert ours.asked == theirs.asked
    assert len({str(each["prompts"]) for each in ours.asked}) == 4  # one to warm up, three runs
    assert [each.ratio for each in report.ratios] == pytest.approx([1.5, 1.5])
    same = [each.median for each in report.results if each.case["measure"] == vllm_plugin.SAME.name]
    assert same == [50.0]
    assert report.as_json()["versions"][vllm_plugin.COUNTS] == "9 rows certified"


@pytest.mark.parametrize("counts", ["None", "0 rows certified; 8 left to vLLM: no float16"])
def test_vllm_beside_itself_is_an_error(
    counts: str, arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    process = nullcontext(StandInProcess(2.0, 0, counts))
    monkeypatch.setattr(vllm_plugin, "started", lambda *_: process)
    assert vllm_plugin.run(arguments) == 1
    assert f"certified nothing ({counts})" in capfd.readouterr().err


def test_parameters_are_those_of_the_setting_that_vllm_does_not_have_anyway() -> None:
    greedy = vllm_plugin.parameters_of(SETTINGS["greedy"], 5, 7)
    assert greedy == {"temperature": 0.0, "max_tokens": 5, "seed": 7}
    every = vllm_plugin.parameters_of(SETTINGS["all"], 5, 7)
    assert (every["top_k"], every["min_p"], every["repetition_penalty"]) == (50, 0.05, 1.1)


def test_without_vllm_it_ends_with_a_sentence(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments.vllm_python = Path("/nowhere/python")
    assert vllm_plugin.run(arguments) == 1
    assert "no such interpreter" in capsys.readouterr().err
