"""An index when one is needed: found beside the model or in the user's cache, else built there."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.hub_cache import in_hub_cache
from lexshard.actors.index.build import IndexSettings, build_index, cluster_count, own_rows
from lexshard.actors.index.container import CLUSTERS, Header, read_header
from lexshard.actors.index.errors import IndexFileError
from lexshard.actors.index.format import Index, check_weights, describe_weights, read_index
from lexshard.actors.index.metadata import Weights
from lexshard.actors.index.steps import Progress
from lexshard.kernels.bounds import Clusters
from lexshard.kernels.home import home_folder, writable

# Not *.safetensors, though it is one: servers that load every such file beside a model would try.
FILE_NAME = "vocabulary.lexshard"
# k-means that takes more products is for `lexshard index build`, not for a server's first start.
CHEAP_PRODUCTS = 2e12


def default_index_path(folder: str | Path, weights: Weights) -> Path:
    """Where an index is built: beside the model if that is a place for files, else in the user's
    cache, or what stands for it (see `writable`), by the hash of the weights."""
    own = os.access(folder, os.W_OK) and not in_hub_cache(folder)
    return Path(folder) / FILE_NAME if own else _cached(writable(home_folder()), weights)


def open_or_build(
    folder: str | Path,
    model: LoadedModel,
    path: str | Path | None = None,
    *,
    tiers: Collection[str] = ("int8", "int4"),
    clusters: bool = False,
    announce: Callable[[str], None] = print,
    progress: Progress | None = None,
) -> Index:
    """The index of ``model``, loaded from ``folder``, with ``tiers`` and, if asked, clusters.

    Without ``path`` an index is looked for beside the model and in the user's cache; where none
    fits the weights (``announce`` is told why), one is built with what is asked and what the found
    one had. Clusters are only built where k-means is cheap: else ``Index.clusters`` is None. A
    build takes the body's cache: allocate it anew afterwards.

    With ``path`` that file must fit: IndexMismatchError or IndexFileError where it does not. Where
    there is no such file it is built.
    """
    head = own_rows(model)
    weights = describe_weights(head.weight, head.bias)
    wanted = tuple(tiers)
    if path is not None and Path(path).is_file():
        return read_index(Path(path), weights, wanted)
    found: Header | None = None
    target = default_index_path(folder, weights) if path is None else Path(path)
    places = (Path(folder) / FILE_NAME, _cached(home_folder(), weights), target)
    for place in dict.fromkeys(places) if path is None else ():
        header = _fitting(place, weights, announce)
        if header is not None and _holds(header, wanted, clusters, weights):
            try:
                return read_index(place, weights, wanted)
            except IndexFileError as error:
                announce(f"{error} (doing so now)")
        found = found or header
    settings = _settings(found, wanted, clusters, weights)
    made = [*settings.tiers, *(["clusters"] if settings.clusters != 0 else [])]
    announce(f"building the vocabulary index {target} ({', '.join(made)}), once for these weights")
    if clusters and settings.clusters == 0:
        announce("clusters would take long and are left out: `lexshard index build` makes them")

    def still_wanted() -> IndexSettings:
        # Another start may have put other parts there while this one waited for its turn.
        there = _fitting(target, weights, lambda _: None)
        return _settings(there or found, wanted, clusters, weights)

    build_index(folder, model, target, still_wanted, progress=progress)
    return read_index(target, weights, wanted)


def index_clusters(model: LoadedModel, configuration: EngineConfiguration) -> Clusters:
    """The clusters of the index that ``configuration`` names or that is found or built. Raises
    ValueError where there are none, and what `open_or_build` raises."""
    index = open_or_build(configuration.model, model, configuration.index, tiers=(), clusters=True)
    if index.clusters is None:
        raise ValueError(
            "the paper's head needs clusters, which take long for this model: make them with "
            f"`lexshard index build {configuration.model}`"
        )
    return index.clusters


def _cached(home: Path, weights: Weights) -> Path:
    return home / f"{weights.hash[:32]}.lexshard"


def _fitting(path: Path, weights: Weights, announce: Callable[[str], None]) -> Header | None:
    if not path.is_file():
        return None
    try:
        header = read_header(path)
        check_weights(path, header, weights)
    except IndexFileError as error:
        announce(f"{error} (doing so now)")
        return None
    return header


def _holds(header: Header, tiers: Collection[str], clusters: bool, weights: Weights) -> bool:
    """Whether building could add nothing that is asked for."""
    lacking = clusters and CLUSTERS not in header.parts and _cheap(IndexSettings(), weights)
    return not lacking and set(tiers) <= set(header.tiers)


def _settings(
    found: Header | None, tiers: Collection[str], clusters: bool, weights: Weights
) -> IndexSettings:
    """What is asked, and what a fitting file already has, made as it was."""
    default = IndexSettings()
    count = None if clusters and _cheap(default, weights) else 0
    if found is None:
        return IndexSettings(tiers=tuple(tiers), clusters=count)
    metadata = found.metadata()
    report = metadata.clusters
    return IndexSettings(
        tiers=tuple(dict.fromkeys([*found.tiers, *tiers])),
        clusters=count if report is None else report.requested,
        kind=default.kind if report is None else report.kind,
        iterations=default.iterations if report is None else report.iterations,
        seed=metadata.calibration.seed,
    )


def _cheap(settings: IndexSettings, weights: Weights) -> bool:
    count = cluster_count(settings, weights.rows)
    return weights.rows * count * weights.columns * settings.iterations < CHEAP_PRODUCTS
