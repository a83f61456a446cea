"""``lexshard bench head``: from hidden states to tokens, the certified head beside dense ones.

All contenders take turns step by step in one process on the same hidden states: the certified head
(screen, rescoring, draw), our dense head (the row kernel screens, then the same), the bare row
kernel and torch in fp32 and bf16, each with torch's own choice of a token. Every step has other
hidden states and other noise. Afterwards the tokens of the certified head are compared with those
of canonical logits of every row.

``--paper`` measures CSV-Decode's cluster bounds instead (see ``cluster_bounds``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from lexshard.loadtest.bench.bandwidth import read_bandwidth
from lexshard.loadtest.bench.head.case import TIME, HeadCase, table
from lexshard.loadtest.bench.head.contenders import DENSE_HEAD, ROW_KERNEL, cpu_contenders
from lexshard.loadtest.bench.head.options import (
    COLUMNS,
    QUICK_COMPARED,
    QUICK_RUNS,
    RUNS,
    VOCABULARY,
)
from lexshard.loadtest.bench.head.synthetic_heads import measure_geometry
from lexshard.loadtest.bench.head.workload import (
    SAMPLING_METHODS,
    HeadWorkload,
    model_workload,
    synthetic_workload,
)
from lexshard.loadtest.bench.measurement import run_measurement
from lexshard.loadtest.bench.record import CaseLabels, Report


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_measurement("head", arguments, measure_into, "certified tokens", arguments.threads)


def measure_into(report: Report, arguments: argparse.Namespace) -> int:
    """Measures what the options ask for; returns how many certified tokens were not canonical."""
    if not arguments.paper:
        return measure_heads(report, arguments)
    from lexshard.loadtest.bench.head import cluster_bounds

    cluster_bounds.measure(report, arguments)
    return 0


def load_workload(arguments: argparse.Namespace) -> HeadWorkload:
    """The head that the options name; prints its geometry."""
    if arguments.model is not None:
        workload = model_workload(arguments.model, arguments.seed)
    else:
        workload = synthetic_workload(
            arguments.geometry,
            arguments.vocabulary or VOCABULARY,
            arguments.columns or COLUMNS,
            getattr(torch, arguments.dtype),
            arguments.seed,
        )
    size, columns = workload.weight.shape
    geometry = measure_geometry(workload.weight, torch.from_numpy(workload.hidden[:32]))
    print(f"{workload.name}: {size:,} x {columns:,} {workload.weight.dtype}; {geometry}")
    return workload


def measure_heads(report: Report, arguments: argparse.Namespace) -> int:
    """Every batch size and need, contenders side by side; returns how many tokens were wrong."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here: use --device cpu")
    bandwidth = read_bandwidth(arguments.threads)
    report.machine["read_bytes_per_second"] = bandwidth
    print(f"{arguments.threads} thread(s) read {bandwidth / 1e9:.1f} GB/s of the host's memory")
    workload = load_workload(arguments)
    build = cpu_contenders
    if arguments.device == "cuda":
        from lexshard.loadtest.bench.head.cuda_contenders import (
            cuda_contenders,
        )  # needs Triton and a GPU

        build = cuda_contenders
        report.machine["gpu"] = torch.cuda.get_device_name()
    contenders = build(workload, arguments.tier, max(arguments.batch))
    cases = []
    runs = arguments.runs or (QUICK_RUNS if arguments.quick else RUNS)
    for batch in arguments.batch:
        for name in arguments.need:
            case = HeadCase(workload, SAMPLING_METHODS[name], batch)
            case.take_turns(contenders, runs)
            case.compare_with_canonical(QUICK_COMPARED if arguments.quick else runs)
            case.record(report, _labels(arguments, workload, case))
            cases.append(case)
    print(f"\n{table(cases, report)}\n")
    print_summary(cases, report)
    return sum(case.compared - case.equal for case in cases)


def print_summary(cases: Sequence[HeadCase], report: Report) -> None:
    """What the figures mean, and against whom they count."""
    equal, compared = sum(c.equal for c in cases), sum(c.compared for c in cases)
    print(f"certified tokens equal to those of all canonical logits: {equal} of {compared}")
    for case in cases:
        ratios = {
            each.against: each.ratio
            for each in report.ratios
            if each.case["measure"] == TIME.name
            and (each.case["batch"], each.case["need"]) == (case.batch, case.method.name)
        }
        own = ratios.pop(DENSE_HEAD, None)
        ratios.pop(ROW_KERNEL, None)
        best = min(ratios, key=lambda name: ratios[name])
        words = f"{ratios[best]:.2f}x the best of the others ({best})"
        if own is not None:
            words += f", {own:.2f}x our dense head"
        print(f"batch {case.batch}, {case.method.name}: {words}")
    print("ms: median and best over the runs. we are: median of the ratios of neighbouring steps.")
    print("certified and own dense: screen, rescoring and draw, the same tokens. The others draw")
    print("with torch: argmax, softmax / exponential noise, or top-k first; other tokens.")


def _labels(arguments: argparse.Namespace, workload: HeadWorkload, case: HeadCase) -> CaseLabels:
    size, columns = workload.weight.shape
    return {
        "head": workload.name,
        "V": size,
        "d": columns,
        "dtype": str(workload.weight.dtype).removeprefix("torch."),
        "device": arguments.device,
        "threads": arguments.threads,
        "tier": arguments.tier,
        "batch": case.batch,
        "need": case.method.name,
    }
