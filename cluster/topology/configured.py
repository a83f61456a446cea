"""What a configuration asks for: which rows are whose, which processes there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.actors.index.automatic import FILE_NAME
from lexshard.actors.index.container import CLUSTERS, Header, read_part
from lexshard.actors.index.errors import IndexFileError
from lexshard.actors.index.stored_weights import check_index_of
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.topology.assignment import Counts, ShardAssignment, assign
from lexshard.cluster.topology.model_sizes import read_model_sizes
from lexshard.cluster.topology.nodes import NodeResources, this_machine
from lexshard.cluster.topology.plan import RoleResources, roles_of
from lexshard.cluster.topology.processes import Processes, processes_of
from lexshard.kernels.bounds import Clusters


def configured_processes(
    configuration: EngineConfiguration, resources: RoleResources, nodes: Sequence[NodeResources]
) -> Processes:
    """The processes of an engine that is to run on ``nodes``, the first of them its own.

    Raises what `configured_assignment` raises, and ``OSError`` for files that cannot be read.
    """
    model = read_model_sizes(configuration.model, configuration.dtype)
    rows = configured_assignment(configuration, model.vocabulary_size).rows
    draft = None
    if configuration.draft not in (None, NGRAM):
        draft = read_model_sizes(configuration.draft, configuration.dtype)
    roles = roles_of(model, configuration, rows, nodes[:1], resources, draft)
    return processes_of(roles, configuration)


def processes_on(config: ServeConfig, nodes: Sequence[NodeResources] = ()) -> Processes:
    """`configured_processes` with what ``config`` gives each role. Where ``nodes`` are none it is
    for machines like this one, with GPUs where ``config`` says so."""
    on_gpus = nodes[0].gpus > 0 if nodes else config.device == "cuda"
    if not nodes:
        nodes = [this_machine()]
        on_gpus = on_gpus or nodes[0].gpus > 0
    return configured_processes(
        config.engine_configuration, role_resources(config, on_gpus=on_gpus), nodes
    )


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


def role_resources(config: ServeConfig, *, on_gpus: bool) -> RoleResources:
    """What the options of ``config`` ask for each role; ``on_gpus`` where nodes have any."""
    gpu = float(config.device != "cpu" and on_gpus)
    return RoleResources(
        body_cpus=_or(config.cpus_per_body, float(config.threads or 1)),
        shard_cpus=config.cpus_per_shard,
        sampler_cpus=_or(config.cpus_per_sampler, float(config.sampler_threads)),
        drafter_cpus=config.cpus_per_drafter,
        body_gpus=_or(config.gpus_per_body, gpu),
        shard_gpus=_or(config.gpus_per_shard, gpu),
    )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


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
    from lexshard.actors.index.hidden import load_tokenizer
    from lexshard.actors.text.traces import read_traces

    folder = Path(configuration.model).expanduser()
    traces = read_traces([trace], load_tokenizer(folder), vocabulary_size)
    return np.bincount(np.concatenate(traces.texts), minlength=vocabulary_size)
