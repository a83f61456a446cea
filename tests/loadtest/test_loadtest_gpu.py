"""``python -m loadtest.gpu``: runs where little is installed, in the time it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lexshard.loadtest.bench.record import Measure, Report
from lexshard.loadtest.gpu import checks, large
from lexshard.loadtest.gpu.checks import gpu_test_files, joined, read_outcome
from lexshard.loadtest.gpu.large import DECODING, SIZES, bytes_read
from lexshard.loadtest.gpu.run import NO_DEVICE, main, summary_page
from lexshard.loadtest.gpu.timing import Budget, Call, in_turns
from tests.support.paths import ROOT

# What the product may need elsewhere and a bare CUDA machine lacks.
ABSENT = (
    "faiss",
    "fastapi",
    "httpx",
    "msgspec",
    "openai",
    "orjson",
    "prometheus_client",
    "pydantic",
    "ray",
    "starlette",
    "uvicorn",
)
IMPORTS = """
import importlib, importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not on a bare CUDA machine", name=name)

sys.meta_path.insert(0, Refuse())

for name in NAMES:
    importlib.import_module(name)
assert not ABSENT & {name.partition(".")[0] for name in sys.modules}
"""


class HostTimer:
    """Stands for a device where there is none."""

    device = "cpu"

    def captured(self, call: Call) -> Call:
        call()
        return call

    def device_run(self, call: Call, repeats: int) -> float:
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)

    wall_run = device_run


@pytest.mark.slow
def test_nothing_is_imported_that_a_bare_cuda_machine_lacks() -> None:
    pytest.importorskip("triton")
    names = ["tests.conftest"]
    names += [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in gpu_test_files()]
    names += [
        f"lexshard.loadtest.gpu.{name}" for name in ("run", "engine", "head", "large", "timing")
    ]
    script = f"ABSENT = set({ABSENT!r})\nNAMES = {names!r}\n{IMPORTS}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_module_with_a_gpu_test_is_run() -> None:
    names = {path.name for path in gpu_test_files()}
    assert {"test_device_search.py", "test_rows.py"} <= names
    assert "test_kv_cache.py" not in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_cuda_device_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path)]) == NO_DEVICE
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_spent_budget_ends_after_one_turn() -> None:
    turns: list[str] = []

    def run(call: Call, repeats: int) -> float:
        call()
        return 1.0

    calls = {name: (lambda name=name: turns.append(name)) for name in ("a", "b")}
    times = in_turns(run, calls, 5, Budget(0.0))
    assert times == {"a": [1.0], "b": [1.0]}
    assert turns == ["a", "b", "a", "b"]  # once to see how long it takes, once measured


def test_pytest_s_last_line_is_understood() -> None:
    outcome = read_outcome("...\n3 failed, 40 passed, 2 skipped, 1 error in 9.1s")
    assert (outcome.passed, outcome.failed, outcome.skipped) == (40, 4, 2)
    assert not outcome.sound
    assert not read_outcome("2 skipped in 3s").sound
    sound = read_outcome("40 passed in 3s")
    assert sound.sound
    assert joined([sound, sound]).passed == 80
    assert not joined([sound, outcome]).sound
    late = checks.TestOutcome(0, 0, 0, "tests/a.py: no time left", ("tests/a.py",))
    assert joined([sound, late]).left_out == ("tests/a.py",)
    assert not joined([sound, late]).sound


BENCH = """
import sys
import torch
from pathlib import Path
from lexshard.loadtest.bench.record import Report
from lexshard.loadtest.gpu.head import Bench, HeadDimensions, Settings
from lexshard.loadtest.gpu.timing import Budget
from tests.loadtest.test_loadtest_gpu import HostTimer
report = Report({}, {}, "test", 0)
wishes = ("sample", "top-50", "greedy")
settings = Settings(batches=(2,), wishes=wishes, runs=1, checked_rows=2, capacity=128)
dimensions = HeadDimensions("test", 400, 64)
bench = Bench(dimensions, HostTimer(), report, Budget(600), settings, lambda: None)
torch.Tensor.bfloat16 = torch.Tensor.float  # the interpreter's products do not know bf16
wrong = bench.run()
assert wrong == 0, wrong
report.write(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_the_head_benchmark_runs_in_the_interpreter(tmp_path: Path) -> None:
    """Every case, with its competitors; the times mean nothing."""
    pytest.importorskip("triton")
    path = tmp_path / "gpu.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BENCH, str(path)]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
    found = json.loads(path.read_text())
    cases = {
        (case["rows"], case["wish"], case["measure"])
        for case in (each["case"] for each in found["results"])
        if "wish" in case and "rows" in case
    }
    measures = {"rescored", "fallbacks", "step"}
    assert {(2, "top-50", measure) for measure in measures} <= cases
    assert (2, "sample", "device") in cases
    against = {each["against"] for each in found["ratios"]}
    assert "cuBLAS + argmax" in against


def test_a_step_of_the_large_shape_reads_all_weights_but_the_embeddings() -> None:
    import transformers

    config = transformers.LlamaConfig(**SIZES)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    read = sum(each.numel() for each in model.parameters() if each.ndim == 2)
    read -= model.get_input_embeddings().weight.numel()
    assert bytes_read(SIZES) == 2 * read


@pytest.mark.slow
def test_the_large_engine_is_measured_in_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model on the CPU; the times mean nothing."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32_768}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(large, "RUNS", 1)
    monkeypatch.setattr(large, "ATTENTION", {"ours": "triton"})
    report = Report({}, {}, "test", 0)
    sizes = {**SIZES, **small, "intermediate_size": 128}
    assert large.measure_large(report, Budget(900), 100.0, device="cpu", sizes=sizes) == []
    measured = {(each.name, *each.case.values()) for each in report.results}
    for sequences, context, wish in DECODING:
        assert ("ours", large.SHAPE, sequences, context, wish, "step") in measured


def test_the_page_shows_what_was_measured_and_nothing_else() -> None:
    report = Report({"gpu": "NVIDIA H200"}, {"torch": "2.11"}, "python -m loadtest.gpu", 0)
    empty = summary_page(report, None, left_out=["engine, graphs"], wrong=0)
    assert "Time ran out" in empty
    assert "- engine, graphs" in empty
    assert empty.count("Not run.") == 2
    case = {"head": "128,256 x 4,096", "model": "m", "tier": "int8", "rows": 1, "wish": "greedy"}
    device = Measure("device", "ms", higher_is_better=False)
    report.add(case, device, {"certified": [0.1], "cuBLAS + argmax": [0.3]}, ours="certified")
    page = summary_page(report, read_outcome("7 passed in 1s"), left_out=[], wrong=0)
    assert "Time ran out" not in page
    assert "Not run." not in page
    assert "7 passed, 0 failed, 0 skipped." in page
    assert "cuBLAS + argmax  0.30 (3.00x)" in page
