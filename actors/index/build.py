"""From a loaded model to its index file, step by step.

1. calibration: hidden states of real text, and what its answers reach;
2. clusters: k-means, then what bounds them;
3. a tier after the other, with or without the direction common to the hidden states;
4. one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.head_weights import HeadWeights
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.index.container import CALIBRATION, CLUSTERS, TIER, Header, Part, digest_of
from lexshard.actors.index.format import code_of, describe_weights
from lexshard.actors.index.hidden import (
    Prompts,
    calibration_prompts,
    fine_grained_ids,
    hidden_states,
    load_tokenizer,
    spread_positions,
)
from lexshard.actors.index.metadata import CalibrationReport, ClusterReport, TierReport
from lexshard.actors.index.steps import BuildSteps, Progress, ProgressBar, alone
from lexshard.actors.index.tier_tensors import disassemble
from lexshard.actors.index.tightness import (
    arrays_of,
    measure_tiers,
    opened_share,
    screened_bytes,
    thresholds,
)
from lexshard.kernels import pool
from lexshard.kernels.bounds import Clusters, summarise
from lexshard.kernels.clustering import Kind as ClusterKind
from lexshard.kernels.clustering import cluster
from lexshard.kernels.quantize import Kind as TierKind
from lexshard.kernels.quantize import OneBitTier, Tier, quantize

TIER_KINDS: tuple[str, ...] = get_args(TierKind)
CLUSTERS_PER_ROW = 0.015  # CSV-Decode's choice


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """What a build makes. ``clusters`` None is 0.015 per output row, 0 is none.

    Raises ValueError for unknown tiers.
    """

    tiers: tuple[str, ...] = TIER_KINDS
    clusters: int | None = None
    kind: ClusterKind = "euclidean"
    iterations: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.tiers if kind not in TIER_KINDS]
        if unknown:
            raise ValueError(f"no tier {', '.join(unknown)}: choose among {', '.join(TIER_KINDS)}")


def cluster_count(settings: IndexSettings, rows: int) -> int:
    """How many clusters the settings ask of ``rows`` output rows."""
    if settings.clusters is not None:
        return min(settings.clusters, rows)
    return max(1, round(CLUSTERS_PER_ROW * rows))


def own_rows(model: LoadedModel) -> HeadWeights:
    """The output head on the CPU without the rows beyond the tokenizer's vocabulary."""
    head, rows = model.head, model.vocabulary_size
    weight = head.weight.detach()[:rows].cpu().contiguous()
    bias = None if head.bias is None else head.bias.detach()[:rows].cpu().float().contiguous()
    return HeadWeights(weight, bias, head.softcap, head.scale)


def build_index(
    folder: str | Path,
    model: LoadedModel,
    out: str | Path,
    settings: IndexSettings | Callable[[], IndexSettings] | None = None,
    *,
    progress: Progress | None = None,
) -> Header:
    """Build the index of ``model``, loaded from ``folder``, at ``out``, as ``settings`` are when no
    other process builds there any more.

    Every finished step is kept beside ``out``: an interrupted build goes on where it stopped, and
    a file already at ``out`` gives what it has in common. The same arguments give the same bytes.
    Waits while another process builds in the same folder. Takes the body's cache: allocate it anew
    afterwards. Raises ValueError for weights with NaN or infinity, OSError where nothing can be
    written.
    """
    head = own_rows(model)
    out = Path(out)
    with alone(out.parent), pool.every_core():
        asked = settings() if callable(settings) else settings or IndexSettings()
        builder = _Builder(Path(folder), model, head, out, asked, progress)
        return builder.build()


class _Builder:
    def __init__(
        self,
        folder: Path,
        model: LoadedModel,
        head: HeadWeights,
        out: Path,
        settings: IndexSettings,
        progress: Progress | None,
    ) -> None:
        self._model = model
        self._head = head
        self._settings = settings
        self._weights = describe_weights(head.weight, head.bias)
        self._count = cluster_count(settings, self._weights.rows)
        steps = len(settings.tiers) + (2 if self._count else 1) + 1
        self._progress = progress or ProgressBar(steps)
        self._steps = BuildSteps(out, self._weights, self._progress)
        self._tokenizer = load_tokenizer(folder)

    def build(self) -> Header:
        try:
            calibration = self._calibration()
            if self._count:
                self._clusters(calibration)
            for kind in self._settings.tiers:
                self._tier(calibration, kind)
            return self._steps.finish()
        finally:
            self._progress.close()

    def _calibration(self) -> Part:
        rows, body = self._weights.rows, self._model.body
        prompts = calibration_prompts(
            self._tokenizer, rows, self._model.max_positions, self._settings.seed
        )
        arguments = {
            "seed": self._settings.seed,
            "prompts": prompts.token_ids,
            "softcap": self._head.softcap,
            "scale": self._head.scale,
            # The hidden states of one prompt stand for the weights of the body.
            "body": digest_of(hidden_states(body, prompts.token_ids[:1])),
        }

        def work() -> tuple[Any, dict[str, Any]]:
            hidden = hidden_states(body, prompts.token_ids)
            fitted = _fitted(prompts)
            tau = thresholds(self._head, hidden[fitted:])
            report = CalibrationReport(
                source=prompts.source,
                seed=self._settings.seed,
                prompts=len(prompts.token_ids),
                positions=len(hidden),
                fitted=fitted,
            )
            return {"report": asdict(report)}, {"hidden": hidden, "thresholds": tau}

        return self._steps.make(CALIBRATION, arguments, work)

    def _clusters(self, calibration: Part) -> None:
        settings, head = self._settings, self._head
        fine = fine_grained_ids(self._tokenizer, self._weights.rows)
        arguments = {
            "count": self._count,
            "kind": settings.kind,
            "iterations": settings.iterations,
            "fine": fine,
            "calibration": calibration.identity,
            "code": code_of(CLUSTERS),
        }

        def work() -> tuple[Any, dict[str, Any]]:
            order, offsets = cluster(
                head.weight,
                self._count,
                kind=settings.kind,
                fine_ids=fine,
                seed=settings.seed,
                iterations=settings.iterations,
                progress=self._progress.advance,
            )
            clusters = summarise(head.weight, head.bias, order, offsets)
            hidden, tau = _measured(calibration)
            opened = opened_share(clusters, head, hidden, tau)
            report = _describe_clusters(clusters, self._count, settings, fine, opened)
            about = {"report": asdict(report), "code": code_of(CLUSTERS)}
            return about, clusters._asdict()

        self._steps.make(CLUSTERS, arguments, work)

    def _tier(self, calibration: Part, kind: str) -> None:
        name = TIER + kind
        arguments = {"calibration": calibration.identity, "code": code_of(name)}

        def work() -> tuple[Any, dict[str, Any]]:
            tier, report = self._choose_form(calibration, kind)
            description, tensors = disassemble(tier)
            about = {"tier": description, "report": asdict(report), "code": code_of(name)}
            return about, tensors

        self._steps.make(name, arguments, work)

    def _choose_form(self, calibration: Part, kind: Any) -> tuple[Tier, TierReport]:
        """The tier with the common direction where that reads fewer bytes, else without."""
        fitted = calibration.about["report"]["fitted"]
        hidden, tau = _measured(calibration)
        mean = calibration.tensors["hidden"][:fitted].mean(axis=0, dtype=np.float64)
        forms = self._forms(kind, mean.astype(np.float32))
        measured = measure_tiers(forms, self._head, hidden, tau)
        order = sorted(range(len(forms)), key=lambda which: measured[which].mean_bytes)
        best = forms[order[0]]
        return best, TierReport(
            stored_bytes=sum(array.nbytes for _, array in arrays_of(best)),
            screened_bytes=screened_bytes(best),
            common_direction=best.common is not None,
            tightness=measured[order[0]],
            alternative=measured[order[1]] if len(forms) > 1 else None,
        )

    def _forms(self, kind: Any, direction: npt.NDArray[np.float32]) -> list[Tier]:
        """The tier without and, where there is a ``direction`` at all, with it."""
        weight, seed = self._head.weight, self._settings.seed
        if not direction.any():
            return [quantize(weight, kind, seed=seed)]
        tier: Tier = quantize(weight, kind, direction=direction, seed=seed)
        if tier.common is None:  # its products are none for fp32
            return [tier]
        if isinstance(tier, OneBitTier):  # its very signs depend on the direction
            return [quantize(weight, kind, seed=seed), tier]
        return [replace(tier, common=None), tier]


def _fitted(prompts: Prompts) -> int:
    """How many positions belong to the first half of the prompts."""
    half = prompts.token_ids[: len(prompts.token_ids) // 2]
    return sum(len(spread_positions(prompt)) for prompt in half)


def _measured(calibration: Part) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The hidden states that measure, and what their answers reach."""
    fitted = calibration.about["report"]["fitted"]
    return calibration.tensors["hidden"][fitted:], calibration.tensors["thresholds"]


def _describe_clusters(
    clusters: Clusters,
    requested: int,
    settings: IndexSettings,
    fine: Sequence[int],
    opened: dict[str, dict[str, float]],
) -> ClusterReport:
    firsts = clusters.order[clusters.offsets[:-1]]
    return ClusterReport(
        kind=settings.kind,
        requested=requested,
        count=len(clusters.radius),
        fine_clusters=int(np.isin(firsts, fine).sum()),
        fine_tokens=len(fine),
        iterations=settings.iterations,
        stored_bytes=sum(array.nbytes for array in clusters),
        opened=opened,
    )
