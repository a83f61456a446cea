"""``lexshard bench head --paper``: what CSV-Decode's cluster bounds can prune.

The ablation of the paper's Table VI on our implementation: number of clusters, epsilon, Euclidean
or spherical k-means, ball or cone or the better of the two, bias tables. Every token opens
clusters until its certificate holds, however many that takes; it counts as certified where that
stays within the budget ``K_max``, and as a fallback where it does not. The rows that the int8
ladder rescores on the same hidden states stand beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.paper.settings import PaperSettings
from lexshard.actors.head.shard import Shard
from lexshard.actors.states.need import Need
from lexshard.kernels.bounds import Clusters, Kind, summarise
from lexshard.kernels.clustering import Kind as Clustering
from lexshard.kernels.clustering import cluster
from lexshard.kernels.quantize import quantize
from lexshard.loadtest.bench.contenders.head import CandidateSearch, search_of
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report
from lexshard.loadtest.bench.synthetic.head_workload import TOP_K, HeadWorkload, model_workload
from lexshard.loadtest.bench.synthetic.heads import (
    Geometry,
    measure_geometry,
    synthetic_head,
    synthetic_hidden,
)

MODEL = Path("models/lexshard-demo")
VOCABULARY, COLUMNS = 16_384, 256
SHARES = (0.0075, 0.015, 0.03, 0.06, 0.25)
SYNTHETIC_SHARES = (0.015, 0.06, 0.25)
QUICK_SHARES = (0.015, 0.06)
COSINES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)
QUICK_COSINES = (0.0, 0.9, 0.98)
EPSILONS = (0.01, 0.05, 0.1)
BOUNDS: tuple[Kind, ...] = ("ball", "cone", "best")
CLUSTERINGS: tuple[Clustering, ...] = ("euclidean", "spherical")
STATES, QUICK_STATES = 32, 8
BIAS_SPREAD = 2.0  # of the head that tells bias tables from one bias for all
BUDGET_SHARE = 0.25
ITERATIONS = 10

OPENED = Measure("opened", "% of rows", higher_is_better=False)
CERTIFIED = Measure("certified within K_max", "%", higher_is_better=True)
FALLBACK = Measure("fallback", "%", higher_is_better=False)
TIGHTNESS = Measure("tightness xi", "of 1", higher_is_better=True)

NOTES = """\
opened: median share of rows opened until the certificate holds; certified: share of tokens for
which that is within K_max, all others fall back to every row. xi: best logit over the largest
bound. Synthetic heads: rows of one cluster of 64 have the cosine given."""
NEEDS = {
    "greedy": Need("top1"),
    "top50": Need("topk", k=TOP_K, inverse_temperature=1.0),
    **{
        f"epsilon {epsilon}": Need("epsilon", epsilon=epsilon, inverse_temperature=1.0)
        for epsilon in EPSILONS
    },
}


@dataclass(frozen=True, slots=True)
class ClusterSetting:
    """One row of the ablation: how a head's rows are clustered and bounded."""

    share: float
    clustering: Clustering
    bounds: Kind
    bias_tables: bool = True


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every head and setting; nothing of it can be wrong."""
    states = QUICK_STATES if arguments.quick else STATES
    for workload, shares in _heads(arguments):
        hidden = workload.hidden[:states]
        geometry = measure_geometry(workload.weight, torch.from_numpy(hidden))
        print(f"{workload.name}: {len(workload.weight):,} x {hidden.shape[1]:,}; {geometry}")
        for setting, clusters in _settings(workload, shares, arguments.seed):
            _record(report, workload, setting, _paper_head(workload, clusters, setting), hidden)
        _record(report, workload, None, _int8_ladder(workload), hidden)
    report.notes.append(NOTES)
    return 0


def _heads(arguments: argparse.Namespace) -> Iterator[tuple[HeadWorkload, Sequence[float]]]:
    """The checkpoint with real hidden states, then synthetic heads; with cluster shares."""
    quick = arguments.quick
    model = arguments.model or MODEL
    yield model_workload(model, arguments.seed), QUICK_SHARES if quick else SHARES
    size = arguments.vocabulary or VOCABULARY
    columns = arguments.columns or COLUMNS
    geometries = [Geometry(cosine=cosine) for cosine in (QUICK_COSINES if quick else COSINES)]
    geometries.append(Geometry(cosine=COSINES[-1], bias_spread=BIAS_SPREAD))
    for geometry in geometries:
        head = synthetic_head(geometry, size, columns, seed=arguments.seed)
        name = f"cosine {geometry.cosine:g}"
        if geometry.bias_spread:
            name += f", bias {geometry.bias_spread:g}"
        hidden = synthetic_hidden(head, 2 * STATES, seed=arguments.seed + 1).numpy()
        workload = HeadWorkload(
            name=name,
            weight=head.weight,
            bias=head.bias,
            scale=1.0,
            softcap=None,
            calibration=hidden[STATES:],
            hidden=hidden[:STATES],
        )
        yield workload, QUICK_SHARES[:1] if quick else SYNTHETIC_SHARES


def _settings(
    workload: HeadWorkload, shares: Sequence[float], seed: int
) -> Iterator[tuple[ClusterSetting, Clusters]]:
    for share in shares:
        for clustering in CLUSTERINGS:
            count = max(1, round(share * len(workload.weight)))
            order, offsets = cluster(
                workload.weight, count, kind=clustering, seed=seed, iterations=ITERATIONS
            )
            clusters = summarise(workload.weight, workload.bias, order, offsets)
            for bounds in BOUNDS:
                yield ClusterSetting(share, clustering, bounds), clusters
            if workload.bias is not None:
                yield (
                    ClusterSetting(share, clustering, "best", bias_tables=False),
                    _one_bias(clusters),
                )


def _one_bias(clusters: Clusters) -> Clusters:
    """Every cluster bounded with the largest bias of all: what bias tables improve on."""
    shape = (len(clusters.radius), 1)
    return clusters._replace(
        bias_values=np.full(shape, clusters.bias_values.max(), np.float32),
        bias_ids=np.full(shape, -1, np.int32),
    )


def _paper_head(
    workload: HeadWorkload, clusters: Clusters, setting: ClusterSetting
) -> CandidateSearch:
    head = PaperHead(
        workload.weight,
        workload.bias,
        workload.softcap,
        workload.scale,
        len(workload.weight),
        clusters,
        PaperSettings(bounds=setting.bounds, budget_share=1.0, adaptive=False),
    )
    return search_of(head)


def _int8_ladder(workload: HeadWorkload) -> CandidateSearch:
    tier = quantize(workload.weight, "int8", direction=workload.calibration.mean(axis=0))
    shard = Shard(
        workload.weight,
        workload.bias,
        workload.softcap,
        workload.scale,
        len(workload.weight),
        ladder=Ladder({"int8": tier}, ((1, "int8"),)),
    )
    return search_of(shard)


def _record(
    report: Report,
    workload: HeadWorkload,
    setting: ClusterSetting | None,
    decide: CandidateSearch,
    hidden: npt.NDArray[np.float32],
) -> None:
    labels: CaseLabels = {
        "head": workload.name,
        "V": len(workload.weight),
        "d": workload.weight.shape[1],
        "K_max": BUDGET_SHARE,
    }
    name = "int8 ladder"
    if setting is not None:
        name = "clusters"
        labels |= {
            "C": f"{setting.share:g} V",
            "k-means": setting.clustering,
            "bounds": setting.bounds,
            "bias tables": "on" if setting.bias_tables else "off",
        }
    for need, wanted in NEEDS.items():
        own: CaseLabels = {**labels, "need": need}
        found = decide(hidden, [wanted] * len(hidden)).certificates
        certified = 100.0 * mean(each.opened_share <= BUDGET_SHARE for each in found)
        report.add(own, OPENED, {name: [round(100.0 * each.opened_share, 3) for each in found]})
        report.add(own, CERTIFIED, {name: [certified]})
        report.add(own, FALLBACK, {name: [100.0 - certified]})
        if need == "greedy":
            report.add(own, TIGHTNESS, {name: [round(each.tightness, 3) for each in found]})
