"""The head of the blueprint's three models: certified against cuBLAS and a fused dense kernel.

Two measures per case. ``device``: CUDA graphs alone, without the host. ``step``: by the host's
clock, from hidden states on the device to candidates (ours) or tokens (theirs) on the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from actors.device_shard import DeviceShard
from actors.ladder import Ladder
from actors.messages import Candidates, Need
from actors.screens import tier_bytes
from kernels.dense import Draws
from kernels.dense import triton_kernel as dense
from kernels.draw import Controls, draw
from kernels.quantize import Kind
from kernels.rows import canonical_logits
from kernels.screen.triton_kernel import place
from kernels.screen.triton_kernel import screen as screen_tier
from loadtest.bench.record import Case, Measure, Report
from loadtest.gpu.budget import Budget
from loadtest.gpu.synthetic import Shape, make_hidden, make_weight, quantize_in_parallel
from loadtest.gpu.timing import Call, captured, device_milliseconds, wall_milliseconds

DEVICE = Measure("device", "ms", higher_is_better=False)
STEP = Measure("step", "ms", higher_is_better=False)
BANDWIDTH = Measure("bandwidth", "GB/s", higher_is_better=True)
RESCORED = Measure("rescored", "tokens per row", higher_is_better=False)
FALLBACKS = Measure("fallbacks", "share of rows", higher_is_better=False)
DIFFERENCES = Measure("token differences", "of rows", higher_is_better=False)

TOP_K = 50
OURS = "certified"
# What each tier is good for: int4's certain bounds leave too much of a top-50.
TIERS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("int8", ("greedy", "sample", "top-50")),
    ("int4-dither", ("greedy", "sample", "top-50")),
    ("int4", ("greedy", "sample")),
)
BATCHES = (1, 8, 64)
CHECKED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure: smaller in tests."""

    batches: tuple[int, ...] = BATCHES
    tiers: tuple[tuple[Kind, tuple[str, ...]], ...] = TIERS
    runs: int = 7
    seed: int = 0


def measure_head(
    shape: Shape, report: Report, budget: Budget, settings: Settings, save: Callable[[], None]
) -> int:
    """Measures every tier and batch that fits the budget; returns how many tokens were wrong.

    ``save`` is called after every case. A wrong token is one that the canonical logits of the
    whole vocabulary would not have given.
    """
    weight = make_weight(shape, settings.seed, "cuda")
    hidden = make_hidden(weight, max(*settings.batches, CHECKED_ROWS), settings.seed + 1)
    on_host = weight.cpu()
    wrong = 0
    for kind, wishes in settings.tiers:
        if budget.spent:
            break
        tier = quantize_in_parallel(on_host, kind, os.cpu_count() or 1)
        _measure_screen(shape, kind, weight, hidden, tier, report, budget, settings)
        ladder = Ladder({kind: tier}, ((1, kind),))
        shard = DeviceShard(weight, None, None, 1.0, shape.vocabulary, ladder)
        for rows, wish in _cases(settings.batches, wishes):
            if budget.spent:
                break
            case: Case = {
                "head": shape.name,
                "model": shape.model,
                "tier": kind,
                "rows": rows,
                "wish": wish,
            }
            _measure_case(case, shard, weight, hidden[:rows], report, budget, settings)
            save()
        wrong += _count_wrong(shape, kind, wishes, shard, weight, hidden, report, budget)
        save()
        del shard
    return wrong


def _cases(batches: tuple[int, ...], wishes: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    return ((rows, wish) for rows in batches for wish in wishes)


def _needs(rows: int, wish: str) -> list[Need]:
    if wish == "greedy":
        return [Need("top1")] * rows
    if wish == "sample":
        return [Need("top1", key=row, position=7, inverse_temperature=1.0) for row in range(rows)]
    return [
        Need("topk", k=TOP_K, key=row, position=7, inverse_temperature=1.0) for row in range(rows)
    ]


def _measure_screen(
    shape: Shape,
    kind: Kind,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    tier: object,
    report: Report,
    budget: Budget,
    settings: Settings,
) -> None:
    """The screen alone, and the bytes per second it reads."""
    placed = place(tier, "cuda")  # type: ignore[arg-type]
    for rows in settings.batches:
        states = hidden[:rows].contiguous()
        call = captured(lambda states=states: screen_tier(states, placed))  # type: ignore[misc]
        times = device_milliseconds({"screen": call}, settings.runs, budget)
        case: Case = {"head": shape.name, "model": shape.model, "tier": kind, "rows": rows}
        report.add(case, DEVICE, times)
        rates = [tier_bytes(placed.tier) / each / 1e6 for each in times["screen"]]
        report.add(case, BANDWIDTH, {"screen": rates})


def _measure_case(
    case: Case,
    shard: DeviceShard,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    report: Report,
    budget: Budget,
    settings: Settings,
) -> None:
    rows, wish = len(hidden), str(case["wish"])
    needs = _needs(rows, wish)
    candidates = shard.rescore(shard.screen(hidden, needs))  # captures the graph
    certificates = candidates.certificates
    rescored = [float(each.rescored_rows) for each in certificates]
    report.add(case, RESCORED, {OURS: rescored})
    report.add(case, FALLBACKS, {OURS: [float(each.fallback) for each in certificates]})
    peers = _peers(weight, hidden, wish, needs)
    graphs = {name: captured(call) for name, call in peers.items()}
    device = device_milliseconds(
        {OURS: shard.replay(rows), **graphs}, settings.runs, budget
    )
    report.add(case, DEVICE, device, ours=OURS)
    read = sum(each.bytes_read for each in certificates)
    dense_bytes = weight.numel() * weight.element_size()
    rates = {
        name: [(read if name == OURS else dense_bytes) / each / 1e6 for each in times]
        for name, times in device.items()
    }
    report.add(case, BANDWIDTH, rates)

    def step() -> Candidates:
        return shard.rescore(shard.screen(hidden, needs))

    def to_host(call: Call) -> Call:
        return lambda: call().cpu()  # type: ignore[attr-defined]

    walls = {OURS: step, **{name: to_host(call) for name, call in peers.items()}}
    report.add(case, STEP, wall_milliseconds(walls, settings.runs, budget), ours=OURS)


def _peers(
    weight: torch.Tensor, hidden: torch.Tensor, wish: str, needs: list[Need]
) -> dict[str, Call]:
    """The dense ways to the same kind of token, each ending with token ids on the device."""
    rounded = hidden.to(weight.dtype)
    transposed = weight.T

    def cublas_greedy() -> torch.Tensor:
        return (rounded @ transposed).argmax(dim=1)

    def cublas_sample() -> torch.Tensor:
        return torch.multinomial(torch.softmax((rounded @ transposed).float(), dim=1), 1)

    def cublas_top_k() -> torch.Tensor:
        best = torch.topk((rounded @ transposed).float(), TOP_K, dim=1)
        chosen = torch.multinomial(torch.softmax(best.values, dim=1), 1)
        return best.indices.gather(1, chosen)

    keys = np.array([need.key for need in needs], np.uint64)
    positions = np.array([need.position for need in needs], np.uint64)

    def fused(scale: float) -> Call:
        draws = dense.place(Draws(keys, positions, np.full(len(needs), scale)), weight.device)
        return lambda: dense.dense_gumbel(rounded, weight, draws)

    if wish == "greedy":
        return {"cuBLAS + argmax": cublas_greedy, "fused dense": fused(0.0)}
    if wish == "sample":
        return {
            "cuBLAS + multinomial": cublas_sample,
            "fused dense + Gumbel": fused(1.0),
            # A bound for every fused dense kernel: it draws nothing.
            "fused dense, greedy": fused(0.0),
        }
    return {"cuBLAS + top-k + multinomial": cublas_top_k}


def _count_wrong(
    shape: Shape,
    kind: Kind,
    wishes: tuple[str, ...],
    shard: DeviceShard,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    report: Report,
    budget: Budget,
) -> int:
    """Tokens of the certified head that are not those of all canonical logits."""
    if budget.spent:
        return 0
    states = hidden[:CHECKED_ROWS]
    rows = len(states)
    every = canonical_logits(states, weight).cpu().numpy().reshape(-1)
    ids = np.tile(np.arange(shape.vocabulary, dtype=np.int32), rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * shape.vocabulary
    wrong = 0
    for wish in wishes:
        needs = _needs(rows, wish)
        controls = Controls(
            np.array([need.inverse_temperature for need in needs]),
            np.array([need.k for need in needs], np.int64),
            np.ones(rows),
            np.full(rows, -np.inf),
            np.array([need.key for need in needs], np.uint64),
            np.array([need.position for need in needs], np.uint64),
        )
        found = shard.rescore(shard.screen(states, needs))
        ours = draw(found.ids, found.logits, found.offsets, controls)
        expected = draw(ids, every, offsets, controls)
        case: Case = {"head": shape.name, "model": shape.model, "tier": kind, "wish": wish}
        differences = {OURS: [float(np.mean(ours != expected))]}
        if wish == "greedy":
            theirs = (states.to(weight.dtype) @ weight.T).argmax(dim=1).cpu().numpy()
            differences["cuBLAS + argmax"] = [float(np.mean(theirs != expected))]
        report.add(case, DIFFERENCES, differences)
        wrong += int(np.sum(ours != expected))
    return wrong
