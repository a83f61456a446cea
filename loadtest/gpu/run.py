"""Tests, engines, heads; results are written as they come."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lexshard.loadtest.bench.machine import describe_machine, installed_versions
from lexshard.loadtest.bench.record import Report, percentile
from lexshard.loadtest.gpu.checks import TestOutcome, run_tests
from lexshard.loadtest.gpu.timing import Budget

PACKAGES = ("torch", "triton", "transformers", "numba", "numpy")
WHOLE_SECONDS = 580.0
TEST_SECONDS = 240.0  # cold: most of it is compiling
ENGINE_SECONDS = 100.0  # one of four engines compiles its layers
COPY_SECONDS = 5.0
LARGE_SECONDS = 200.0
NO_DEVICE = 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu",
        description="Every GPU test and benchmark, in less than 10 minutes.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for gpu.json and gpu.md")
    add("--seconds", type=float, default=WHOLE_SECONDS, help="for everything")
    add("--seed", type=int, default=0)
    add("--skip-tests", action="store_true", help="benchmarks only")
    add("--skip-engine", action="store_true", help="no engine")
    add("--skip-large", action="store_true", help="no engine of an 8B model's shape")
    add("--skip-heads", action="store_true", help="no heads")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0: all is well. 1: a test failed or did not fit the time, or a token was wrong. 2: there is
    no CUDA device."""
    options = parse(arguments)
    import torch

    if not torch.cuda.is_available():
        print(
            "no CUDA device: this command measures GPUs. The kernels' tests without one are in "
            "`make test` (Triton's interpreter).",
            file=sys.stderr,
        )
        return NO_DEVICE
    torch.set_num_threads(1)  # rows are quantised in threads of our own
    budget = Budget(options.seconds)
    command = shlex.join(["python", "-m", "loadtest.gpu", *arguments])
    report = Report(_machine(), installed_versions(PACKAGES), command, options.seed)
    run = GpuRun(report, options.out)
    if not options.skip_tests:
        run.tests = run_tests(budget.part(TEST_SECONDS))
        run.save()
        run.left_out += run.tests.left_out
        print(run.tests.log[-3000:] if not run.tests.sound else "tests passed", flush=True)
    if not options.skip_engine:
        from lexshard.loadtest.gpu.engine import measure_engine

        run.left_out += measure_engine(report, budget.part(ENGINE_SECONDS))
        run.save()
    copies = _measure_copies(run, budget)
    if not options.skip_large:
        from lexshard.loadtest.gpu.large import measure_large

        run.left_out += measure_large(report, budget.part(LARGE_SECONDS), copies)
        run.save()
    if not options.skip_heads:
        _measure_heads(run, budget, options.seed)
    run.save()
    print(run.page())
    failed = run.tests is not None and not run.tests.sound
    return int(failed or run.wrong > 0)


class GpuRun:
    """What has been found so far, and where it is written."""

    def __init__(self, report: Report, folder: Path) -> None:
        self.report = report
        self.tests: TestOutcome | None = None
        self.wrong = 0
        self.left_out: list[str] = []
        self._folder = folder

    def page(self) -> str:
        return summary_page(self.report, self.tests, left_out=self.left_out, wrong=self.wrong)

    def save(self) -> None:
        self.report.write(self._folder / "gpu.json")
        (self._folder / "gpu.md").write_text(self.page(), encoding="utf-8")
        if self.tests is not None:
            (self._folder / "tests.log").write_text(self.tests.log, encoding="utf-8")


def _measure_copies(run: GpuRun, budget: Budget) -> float:
    """GB/s, read plus written."""
    from lexshard.loadtest.gpu.head import BANDWIDTH
    from lexshard.loadtest.gpu.timing import CudaTimer, copy_bandwidth

    copies = copy_bandwidth(CudaTimer(), budget.part(COPY_SECONDS))
    run.report.add({"what": "memory"}, BANDWIDTH, {"copy": copies})
    return percentile(copies, 50)


def _measure_heads(run: GpuRun, budget: Budget, seed: int) -> None:
    from lexshard.loadtest.gpu.head import HEADS, Bench, Settings
    from lexshard.loadtest.gpu.timing import CudaTimer

    timer = CudaTimer()
    for index, dimensions in enumerate(HEADS):
        share = budget.part(budget.left / (len(HEADS) - index))
        bench = Bench(dimensions, timer, run.report, share, Settings(seed=seed), run.save)
        run.wrong += bench.run()
        run.left_out += bench.left_out
        run.save()


def _machine() -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        **describe_machine(),
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def summary_page(
    report: Report, tests: TestOutcome | None, *, left_out: Sequence[str], wrong: int
) -> str:
    """Markdown: the machine, the tests, the engines, the heads. Nothing stands in it that was not
    run; ``left_out`` is what did not fit the time."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    gpu = report.machine.get("gpu", "a machine without a GPU")
    told = "**Time ran out. Not run, or not to the end:**"
    missing = [told, "", *(f"- {each}" for each in left_out), ""] if left_out else []
    ended = "Not run."
    if tests is not None:
        ended = f"{tests.passed} passed, {tests.failed} failed, {tests.skipped} skipped."
    lines = [
        "# GPU run",
        "",
        f"`{report.command}` on {gpu}, {versions}.",
        "",
        *missing,
        "## Tests",
        "",
        ended,
        "",
        f"Tokens of the certified head that the canonical logits do not give: **{wrong}**.",
        "",
        "## Measured",
        "",
        "Medians. *device*: the CUDA graph alone; *step*: by the host's clock, with the tokens on "
        "the host. A ratio above 1 says how many times faster the certified head is. Weights and "
        "hidden states are synthetic (`loadtest/bench/synthetic/heads.py`). *copy*: on the device, "
        "read plus written.",
        "",
        *(["```text", report.table(), "```"] if report.results else ["Not run."]),
        "",
    ]
    return "\n".join(lines)
