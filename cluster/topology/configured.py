"""The assignment of rows to shards that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actors.configuration import EngineConfiguration
from actors.index.automatic import FILE_NAME
from actors.index.container import CLUSTERS, Header, read_part
from actors.index.errors import IndexFileError
from actors.index.stored_weights import check_index_of
from cluster.topology.assignment import Counts, ShardAssignment, assign
from kernels.bounds import Clusters


def configured_assignment(
    configuration: EngineConfiguration, vocabulary_size: int
) -> ShardAssignment:
    """Which of the ``vocabulary_size`` tokens are whose.

    Raises ValueError (`cluster.topology.assignment.AssignmentError` among them) for an assignment
    that cannot be made, and what reading the index raises.
    """
    method = configuration.shard_assignment
    clusters: Clusters | None = None
    found = index_of(configuration) if method.startswith("clusters") else None
    if found is not None and CLUSTERS in found[1].parts:
        clusters = Clusters(**read_part(*found, CLUSTERS).tensors)
    counts = _counts(configuration, vocabulary_size)
    return assign(method, vocabulary_size, configuration.shards, clusters=clusters, counts=counts)


def index_of(configuration: EngineConfiguration) -> tuple[Path, Header] | None:
    """The index of the model where there is one: the one that is named, which must fit its
    weights, else the one beside it if that fits, for a server would make it anew."""
    folder = Path(configuration.model).expanduser()
    if configuration.index is not None:
        path = Path(configuration.index)
        return path, check_index_of(path, folder)
    try:
        return folder / FILE_NAME, check_index_of(folder / FILE_NAME, folder)
    except IndexFileError:
        return None


def _counts(configuration: EngineConfiguration, vocabulary_size: int) -> Counts | None:
    """How often each token stands in the trace [V]; None without one."""
    if configuration.shard_trace is None:
        return None
    trace = Path(configuration.shard_trace)
    if not trace.is_file():
        raise ValueError(f"no trace at {trace}: give a file of JSON lines or text")
    from actors.decision.hot_vocabulary.traces import read_traces
    from actors.index.hidden import load_tokenizer

    folder = Path(configuration.model).expanduser()
    traces = read_traces([trace], load_tokenizer(folder), vocabulary_size)
    return np.bincount(np.concatenate(traces.texts), minlength=vocabulary_size)
