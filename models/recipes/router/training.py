"""From a target, a draft and prompts to a router file.

1. the target writes texts after the prompts, greedily and drawn at several temperatures;
2. the draft's hidden states over them are the router's inputs; how often each token was drawn
   says which are hot;
3. the other tokens' output rows are clustered, and a small network learns in which of the clusters
   the draft's next token is;
4. texts of prompts that nothing was learned from say how many clusters each step needs, and what
   the router is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.drafter.router.file import (
    CLUSTERS,
    NETWORK,
    ROUTER,
    Ids,
    RouterFile,
    Spread,
    TrainingReport,
    training_report,
)
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.container import Part
from lexshard.actors.index.format import describe_weights
from lexshard.actors.index.steps import BuildSteps, Progress, ProgressBar, alone
from lexshard.loadtest.draft_heads.compared import FULL, DraftHeads
from lexshard.loadtest.draft_heads.compared import ROUTER as ROUTED_HEAD
from lexshard.loadtest.draft_heads.standing import blocks, standing_guesses
from lexshard.loadtest.draft_heads.texts import (
    DraftPositions,
    Tokens,
    WrittenText,
    draft_positions,
    draftable,
)
from models.recipes.router.budgets import choose_budgets
from models.recipes.router.clusters import tokens_by_frequency, vocabulary_clusters
from models.recipes.router.labels import cluster_shares
from models.recipes.router.network import fit_network

HELD_OUT = 8  # every eighth prompt measures
PROMPTS_OF_A_PART = 128  # written in one go: what an interruption costs
TOKENS_OF_A_CLUSTER = 64
HOT_SHARE = 1 / 64  # of the vocabulary
LABEL_TEMPERATURE = 1.0
NEVER = -1e30  # score of a cluster that is looked at without being picked

BUNDLED_PROMPTS = Path(__file__).parent / "prompts" / "prompts.jsonl"

# The target's continuations of prompts at a temperature, with a seed each, by so many tokens.
# Texts of one seed share their noise: what is rare would be drawn in all of them at one place.
Write = Callable[[Sequence[Tokens], float, Sequence[int], int], list[WrittenText]]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """How a router is trained.

    ``hot`` tokens are looked at always (None: a 64th of all), the others are in ``clusters``
    clusters (None: one for every 64 tokens there are). The network has ``width`` hidden units.
    ``share`` of the vocabulary is the most that a draft of ``steps`` guesses may look at on
    average. The target writes ``tokens`` tokens after every prompt at each of the ``temperatures``.

    Raises ValueError for a share that is not between 0 and 1.
    """

    hot: int | None = None
    clusters: int | None = None
    width: int = 96
    epochs: int = 12
    steps: int = 5
    share: float = 0.1
    tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8, 0.8, 0.8, 1.0, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"a share of {self.share} is none: give one above 0, at most 1")


class Target(NamedTuple):
    """The model that is guessed for, and how to have it write."""

    name: str
    weights: str  # hash of its output weights
    write: Write


def train_router(
    target: Target,
    draft: LoadedModel,
    prompts: Sequence[Tokens],
    out: Path,
    settings: RouterSettings,
    progress: Progress | None = None,
) -> TrainingReport:
    """Train a router for ``draft`` at ``out``.

    Every finished step is kept beside ``out``: an interrupted training goes on where it stopped.
    The same arguments give the same file. Takes the draft body's cache: allocate it anew
    afterwards. Raises ValueError for a draft that cannot be drafted with and for prompts that leave
    nothing to learn from, OSError where nothing can be written.
    """
    with alone(out.parent):
        return _Training(target, draft, prompts, out, settings, progress).run()


class _Training:
    def __init__(
        self,
        target: Target,
        draft: LoadedModel,
        prompts: Sequence[Tokens],
        out: Path,
        settings: RouterSettings,
        progress: Progress | None,
    ) -> None:
        self._target = target
        self._settings = settings
        self._body = draftable(draft)
        self._head = own_rows(draft)
        self._size = len(self._head.weight)
        room = draft.max_positions - settings.tokens
        self._prompts = [ids[-room:] for ids in prompts]
        if len(self._prompts) < 2 or room < 1:
            raise ValueError("a router needs at least two prompts, and room for text behind them")
        parts = len(settings.temperatures) * len(self._pieces())
        self._progress = progress or ProgressBar(parts + 4)
        self._steps = BuildSteps(
            out, describe_weights(self._head.weight, None), self._progress, ROUTER
        )

    def run(self) -> TrainingReport:
        try:
            texts, written = self._texts()
            self._progress.begin("hidden states")
            positions = draft_positions(self._body, texts, self._progress.advance)
            held_out = positions.text % len(self._prompts) % HELD_OUT == 0
            learned, measured = positions.of(~held_out), positions.of(held_out)
            clusters = self._clusters(learned, written)
            self._network(clusters, learned, measured, len(positions))
            return training_report(self._steps.finish(kept=(CLUSTERS, NETWORK)))
        finally:
            self._progress.close()

    def _pieces(self) -> list[slice]:
        return list(blocks(len(self._prompts), PROMPTS_OF_A_PART))

    def _texts(self) -> tuple[list[WrittenText], list[str]]:
        """The target's texts, and the identities of the parts they are kept in."""
        settings, target = self._settings, self._target
        texts, identities = [], []
        for number, temperature in enumerate(settings.temperatures):
            first = (settings.seed * len(settings.temperatures) + number) * len(self._prompts)
            for at, piece in enumerate(self._pieces()):
                asked = self._prompts[piece]
                seeds = range(first + piece.start, first + piece.start + len(asked))
                arguments = {
                    "target": target.weights,
                    "prompts": asked,
                    "temperature": temperature,
                    "seed": seeds.start,
                    "tokens": settings.tokens,
                }
                write = partial(self._written, asked, temperature, seeds)
                part = self._steps.make(f"texts-{number}-{at}", arguments, write)
                texts.extend(unflattened(part.tensors, asked))
                identities.append(part.identity)
        return texts, identities

    def _written(
        self, asked: Sequence[Tokens], temperature: float, seeds: Sequence[int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        texts = self._target.write(asked, temperature, seeds, self._settings.tokens)
        return {}, flattened(texts)

    def _clusters(self, learned: DraftPositions, written: list[str]) -> Part:
        settings, size = self._settings, self._size
        hot = round(HOT_SHARE * size) if settings.hot is None else settings.hot
        count = settings.clusters or max(2, size // TOKENS_OF_A_CLUSTER)
        arguments = {"hot": hot, "count": count, "seed": settings.seed, "texts": written}

        def work() -> tuple[dict[str, Any], dict[str, Any]]:
            frequent = tokens_by_frequency(learned.drawn, size)
            cluster_of = vocabulary_clusters(
                self._head.weight,
                frequent[:hot],
                count,
                seed=settings.seed,
                progress=self._progress.advance,
            )
            narrow = np.uint16 if size <= 2**16 else np.int32
            return {}, {
                "cluster_of": cluster_of.astype(narrow),
                "frequent": frequent.astype(narrow),
                "always": np.arange(1 if hot else 0, dtype=np.int32),
            }

        return self._steps.make(CLUSTERS, arguments, work)

    def _network(
        self, clusters: Part, learned: DraftPositions, measured: DraftPositions, written: int
    ) -> None:
        settings = self._settings
        cluster_of = clusters.tensors["cluster_of"].astype(np.int32)
        always = np.array(clusters.tensors["always"])
        arguments = {
            "clusters": clusters.identity,
            "width": settings.width,
            "epochs": settings.epochs,
            "steps": settings.steps,
            "share": settings.share,
            "seed": settings.seed,
        }

        def advance(part: float) -> Callable[[float], None]:
            return lambda share: self._progress.advance(part * share)

        def work() -> tuple[dict[str, Any], dict[str, Any]]:
            wanted = cluster_shares(
                self._head, learned.hidden, cluster_of, LABEL_TEMPERATURE, advance(0.3)
            )
            network, losses = fit_network(
                learned.embedded,
                learned.before,
                wanted[:, len(always) :],
                width=settings.width,
                epochs=settings.epochs,
                seed=settings.seed,
                progress=advance(0.5),
            )
            outer = np.concatenate([np.zeros((len(always), settings.width)), network.outer])
            bias = np.concatenate([np.full(len(always), NEVER), network.outer_bias])
            file = RouterFile(
                cluster_of=cluster_of,
                frequent=clusters.tensors["frequent"].astype(np.int32),
                always=always,
                inner=network.inner,
                inner_bias=network.inner_bias,
                outer=outer.astype(np.float32),
                outer_bias=bias.astype(np.float32),
                budgets=np.ones(settings.steps, np.int32),
                report=self._report(cluster_of, always, losses, written),
            )
            budgets, report = self._measure(file, measured, advance(0.1))
            tensors = {
                "inner": file.inner,
                "inner_bias": file.inner_bias,
                "outer": file.outer,
                "outer_bias": file.outer_bias,
                "budgets": np.array(budgets, np.int32),
            }
            return {"report": asdict(report)}, tensors

        self._steps.make(NETWORK, arguments, work)

    def _measure(
        self, file: RouterFile, measured: DraftPositions, progress: Callable[[float], None]
    ) -> tuple[tuple[int, ...], TrainingReport]:
        """The budgets, and what the router is worth with them."""
        weight, size, steps = self._head.weight, self._size, self._settings.steps
        heads = DraftHeads(weight, file, steps)
        full = standing_guesses(heads.full, measured, size, progress)
        stands = full.stand(0)
        if not stands.any():
            raise ValueError(
                f"none of {len(stands):,} guesses was what {self._target.name} drew: name its draft"
            )
        routed = standing_guesses(heads.routed, measured, size, progress)
        budgets = choose_budgets(routed, measured.text, steps, self._settings.share * size)
        tokens = routed.tokens(budgets)
        found = {
            FULL: heads.counted(measured, full, (0,) * steps),
            **heads.of_size(measured, routed, tokens, {ROUTED_HEAD: budgets}),
        }
        report = replace(
            file.report,
            recall=tuple(float((routed.least[stands] <= k).mean()) for k in budgets),
            accepted={name: each.mean for name, each in found.items()},
            share={name: each.share for name, each in found.items()},
        )
        return budgets, report

    def _report(
        self, cluster_of: Ids, always: Ids, losses: tuple[float, ...], written: int
    ) -> TrainingReport:
        sizes = np.bincount(cluster_of)
        others = sizes[len(always) :]
        return TrainingReport(
            target=self._target.name,
            seed=self._settings.seed,
            prompts=len(self._prompts),
            written_tokens=written,
            temperatures=self._settings.temperatures,
            hot_tokens=int(sizes[: len(always)].sum()),
            cluster_sizes=Spread(*(float(np.quantile(others, at)) for at in (0.0, 0.5, 1.0))),
            epochs=self._settings.epochs,
            losses=losses,
            recall=(),
            accepted={},
            share={},
        )


def flattened(texts: Sequence[WrittenText]) -> dict[str, npt.NDArray[Any]]:
    """The texts without their prompts as arrays that a file can hold."""
    lengths = [len(text.output_ids) for text in texts]
    return {
        "output_ids": np.array([i for text in texts for i in text.output_ids], np.int32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "temperature": np.array([text.temperature for text in texts]),
        "key": np.array([text.key for text in texts], np.uint64),
    }


def unflattened(
    arrays: dict[str, npt.NDArray[Any]], prompts: Sequence[Tokens]
) -> list[WrittenText]:
    """The texts behind these prompts again."""
    offsets = arrays["offsets"].tolist()
    return [
        WrittenText(
            tuple(prompt),
            tuple(arrays["output_ids"][first:last].tolist()),
            float(temperature),
            int(key),
        )
        for prompt, first, last, temperature, key in zip(
            prompts, offsets[:-1], offsets[1:], arrays["temperature"], arrays["key"], strict=True
        )
    ]
