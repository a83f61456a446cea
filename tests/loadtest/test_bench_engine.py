"""``lexshard bench engine``: same work for every engine, honest arithmetic, one file format."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.messages import SamplingParameters
from lexshard.loadtest.bench import engine
from lexshard.loadtest.bench.engine_runs import EngineRun, check_lengths, compare
from lexshard.loadtest.bench.options import engine as engine_options
from lexshard.loadtest.bench.peers.beside_vllm import alternate, program
from lexshard.loadtest.bench.peers.own_engine import EngineRunner
from lexshard.loadtest.bench.peers.transformers_generate import GenerateRunner, left_padded
from lexshard.loadtest.bench.synthetic.jobs import OUTPUT_TOKENS, PROMPT_TOKENS, Job, mixed_jobs
from lexshard.loadtest.bench.synthetic.random_model import DEMO, write_random_model
from tests.support.bench_options import parsed
from tests.support.tiny_models import save_tiny

MEASURED = ("throughput", "TTFT", "TPOT", "decoding")


class WordTokenizer:
    """One token a word: enough for lengths and determinism."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [len(word) for word in text.split()]


class StubRunner:
    """Answers at once with ascending tokens; ``seconds`` apart on its own clock."""

    information = SimpleNamespace(parameters=10**6, body="stub", head="stub", max_model_len=512)

    def __init__(self, name: str, seconds: float, calls: list[str]) -> None:
        self.name = name
        self._seconds = seconds
        self._calls = calls

    def run(self, jobs: Sequence[Job]) -> EngineRun:
        self._calls.append(self.name)
        times = [tuple(self._seconds * (i + 1) for i in range(job.output_tokens)) for job in jobs]
        return EngineRun(
            wall_seconds=max(each[-1] for each in times),
            token_ids=tuple(tuple(range(job.output_tokens)) for job in jobs),
            token_seconds=tuple(times),
            shares={"head": 0.25} if self.name == "lexshard" else {},
        )


def test_tokens_after_a_first_difference_are_not_compared() -> None:
    assert compare([(1, 2, 3), (4, 5, 6)], [(1, 2, 3), (4, 9, 6)]) == (4, 6, 1)


def test_decoding_is_what_comes_while_all_requests_draw() -> None:
    times = ((1.0, 2.0, 3.0, 4.0), (2.5, 3.0, 3.5))
    run = EngineRun(4.0, ((0,) * 4, (0,) * 3), times)
    assert run.decoding == 3.0  # in the second from 2.5 on
    alone = replace(run, token_seconds=(times[0],))
    assert alone.decoding == 1e3 / alone.time_per_output_token
    assert math.isnan(replace(run, token_seconds=((1.0, 2.0), (2.5, 3.0))).decoding)


# -- workload -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 16, 33])
def test_requests_have_mixed_lengths_with_the_same_mean_in_every_case(count: int) -> None:
    jobs = mixed_jobs(WordTokenizer(), count, 17)
    prompts = [len(job.prompt_ids) for job in jobs]
    outputs = [job.output_tokens for job in jobs]
    assert len(set(prompts)) == len(set(outputs)) == count
    for lengths, (low, high) in ((prompts, PROMPT_TOKENS), (outputs, OUTPUT_TOKENS)):
        assert low <= min(lengths) <= max(lengths) <= high
        assert sum(lengths) / count == pytest.approx((low + high) / 2, abs=0.5)


# -- running --------------------------------------------------------------------------------------


def test_a_side_that_makes_too_few_tokens_is_an_error() -> None:
    jobs = mixed_jobs(WordTokenizer(), 1, 17)
    short = [Job(job.prompt_ids, job.output_tokens - 1) for job in jobs]
    with pytest.raises(RuntimeError, match="short made"):
        check_lengths("short", StubRunner("short", 0.01, []).run(short), jobs)


def test_worker_processes_take_turns_and_report_json(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        "import json, sys\n"
        "task = json.load(open(sys.argv[3]))\n"
        "open(sys.argv[2], 'a').write(sys.argv[1])\n"
        "runs = [[{'wall_seconds': 1.0, 'token_ids': [[0] * job['output_tokens'] for job in case],"
        " 'token_seconds': [[1.0] for job in case]}] * task['repeats'] for case in task['cases']]\n"
        "print('chatter')\n"
        "print(json.dumps({'versions': {}, 'cases': runs}))\n"
    )
    workers = [program(name, sys.executable, "-c", script, name, str(log)) for name in "ab"]
    task = {"cases": [[{"prompt_ids": [1, 2], "output_tokens": 3}]], "repeats": 2}
    reports = list(alternate(workers, [task, task]))
    assert log.read_text() == "abba"  # who begins changes
    assert reports[0][0]["cases"][0][1]["token_ids"] == [[0, 0, 0]]


def test_a_failing_worker_process_shows_its_last_words() -> None:
    worker = program("peer", sys.executable, "-c", "raise SystemExit('no such model')")
    with pytest.raises(RuntimeError, match=r"(?s)peer process failed.*no such model"):
        list(alternate([worker], [{}]))


# -- the command ----------------------------------------------------------------------------------


parse = partial(parsed, engine_options.add_arguments)


@pytest.fixture
def stub_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts stubs in place of the engines and the tokenizer; returns the order of their runs."""
    calls: list[str] = []
    monkeypatch.setattr(
        engine, "EngineRunner", lambda *_, **__: StubRunner("lexshard", 0.01, calls)
    )
    monkeypatch.setattr(engine, "GenerateRunner", lambda *_: StubRunner("generate", 0.04, calls))
    monkeypatch.setattr(
        engine, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *_, **__: WordTokenizer())
    )
    return calls


def test_a_run_prints_what_it_measured_and_what_it_did_not(
    tmp_path: Path, stub_calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "engine.json"
    assert engine.run(parse("--runs", "3", "--requests", "1,4", "--json", str(path))) == 0
    printed = capsys.readouterr().out
    assert "vLLM: not measured" in printed
    assert "288 of 288 tokens are equal, 0 first differences" in printed
    written = json.loads(path.read_text())
    parts = {"machine", "versions", "date", "command", "seed", "results", "ratios"}
    assert set(written) == parts
    ratios = {(r["case"]["requests"], r["case"]["measure"]): r["ratio"] for r in written["ratios"]}
    assert ratios[4, "throughput"] == pytest.approx(4)
    assert ratios[1, "TTFT"] == pytest.approx(4)
    measured = {(each["name"], each["case"]["measure"]) for each in written["results"]}
    assert measured == {
        *((name, measure) for name in ("lexshard", "generate") for measure in MEASURED),
        ("lexshard", "head share"),
        ("generate", "equal tokens"),
    }


@pytest.mark.parametrize(
    "options", [(), ("--against", "generate"), ("--against", "dense", "--vllm-python", "python")]
)
def test_engines_that_draw_with_noise_of_their_own_are_compared_at_temperature_0_only(
    options: tuple[str, ...], stub_calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine.run(parse("--temperature", "-1")) == 1
    assert "give 0 or more" in capsys.readouterr().err
    assert engine.run(parse("--temperature", "0.8", *options)) == 1
    assert "only our engines draw the same tokens" in capsys.readouterr().err
    assert not stub_calls


def test_a_text_that_differs_in_any_run_is_told(
    stub_calls: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unsteady(StubRunner):
        def run(self, jobs: Sequence[Job]) -> EngineRun:
            run = super().run(jobs)
            if self._calls.count(self.name) != 3:  # the second of three after the one that warms up
                return run
            return replace(run, token_ids=tuple((*each[:-1], 99_999) for each in run.token_ids))

    monkeypatch.setattr(engine, "GenerateRunner", lambda *_: Unsteady("generate", 0.04, stub_calls))
    assert engine.run(parse("--runs", "3", "--requests", "1")) == 0
    assert "287 of 288 tokens are equal, 1 first difference" in capsys.readouterr().out


def test_a_peer_in_its_own_process_is_paired_with_ours_in_one(
    tmp_path: Path, stub_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reports(_workers: object, tasks: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
        assert len({str(task["cases"]) for task in tasks}) == len(tasks)  # no text decides alone
        for slowness, task in enumerate(tasks, 1):
            cases = [[Job(**job) for job in case] for case in task["cases"]]
            told: list[dict[str, Any]] = []
            for name, seconds, versions in (("lexshard", 0.01, {}), ("vllm", 0.03, {"vllm": "0"})):
                stub = StubRunner(name, seconds * slowness, [])
                runs = [[asdict(stub.run(jobs))] * task["repeats"] for jobs in cases]
                told.append({"versions": versions, "cases": runs})
            yield told

    monkeypatch.setattr(engine, "alternate", reports)
    path = tmp_path / "engine.json"
    options = ("--runs", "3", "--requests", "4", "--json", str(path))
    assert engine.run(parse(*options, "--vllm-python", sys.executable)) == 0
    written = json.loads(path.read_text())
    assert written["versions"]["vllm"] == "0"
    ratios = {
        each["case"]["measure"]: each["ratio"]
        for each in written["ratios"]
        if each["against"] == "vllm" and each["case"]["setting"] == "process pairs"
    }
    assert ratios == pytest.approx(dict.fromkeys(MEASURED, 3))


# -- real models ----------------------------------------------------------------------------------


def test_generate_pads_left_and_never_stops_early(tmp_path: Path) -> None:
    tiny_checkpoint = str(save_tiny("llama", tmp_path / "tiny"))
    input_ids, mask = left_padded([(7, 8, 9), (5,)])
    assert input_ids.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    runner = GenerateRunner(tiny_checkpoint, "float32", 1)
    jobs = (Job((7, 8, 9), 5), Job((5,), 3))
    together = runner.run(jobs)
    assert [len(tokens) for tokens in together.token_ids] == [5, 3]
    assert [len(times) for times in together.token_seconds] == [5, 3]
    alone = tuple(runner.run([job]).token_ids[0] for job in jobs)
    assert together.token_ids == alone
    assert together.wall_seconds >= max(times[-1] for times in together.token_seconds)
    assisted = GenerateRunner(tiny_checkpoint, "float32", 1, draft=tiny_checkpoint).run(jobs)
    assert assisted.token_ids == alone
    assert [len(times) for times in assisted.token_seconds] == [5, 3]


# -- the random model -----------------------------------------------------------------------------

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "vocab_size": 20_000,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "head_dim": 64,
}


def test_a_random_model_reads_text_as_the_demo_does_and_does_not_repeat_itself(
    tmp_path: Path,
) -> None:
    write_random_model(tmp_path, seed=12, **SMALL)
    model = load(tmp_path, device="cpu")
    assert (model.body.name, model.dtype) == ("fused", "bfloat16")
    assert model.vocabulary_size == SMALL["vocab_size"]
    mine, demo = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path, DEMO))
    text = "Once upon a time, in 1904, there was a letter."
    assert mine.encode(text) == demo.encode(text)
    assert len(mine) == SMALL["vocab_size"]
    runner = EngineRunner(
        EngineConfiguration(str(tmp_path), dtype="bfloat16", threads=1, head="dense"),
        SamplingParameters(temperature=0.0),
    )
    (tokens,) = runner.run([Job((5, 6, 7), 48)]).token_ids
    assert len(set(tokens)) > 36
