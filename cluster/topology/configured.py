"""What a configuration asks for: which rows are whose, which roles and processes there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.actors.index.automatic import FILE_NAME
from lexshard.actors.index.container import CLUSTERS, Header, read_part
from lexshard.actors.index.errors import IndexFileError
from lexshard.actors.index.stored_weights import check_index_of
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.topology.assignment import Counts, ShardAssignment, assign
from lexshard.cluster.topology.nodes import NodeResources, this_machine
from lexshard.cluster.topology.processes import Parts, Processes, Role
from lexshard.cluster.topology.sizes import (
    ModelSizes,
    body_memory,
    drafter_memory,
    kv_blocks,
    loading_bytes,
    read_model_sizes,
    sampler_memory,
    shard_memory,
)
from lexshard.kernels.bounds import Clusters


@dataclass(frozen=True, slots=True)
class RoleResources:
    """What each process of a kind asks of its node, by shares of a CPU or GPU; at most one GPU."""

    body_cpus: float = 1.0
    shard_cpus: float = 1.0
    sampler_cpus: float = 1.0
    drafter_cpus: float = 1.0
    body_gpus: float = 0.0
    shard_gpus: float = 0.0


def role_resources(config: ServeConfig, *, on_gpus: bool) -> RoleResources:
    """What the options of ``config`` ask for each role; ``on_gpus`` where nodes have any."""

    def either(given: float | None, default: float) -> float:
        return default if given is None else given

    gpu = float(config.device != "cpu" and on_gpus)
    return RoleResources(
        body_cpus=either(config.cpus_per_body, float(config.threads or 1)),
        shard_cpus=config.cpus_per_shard,
        sampler_cpus=either(config.cpus_per_sampler, float(config.sampler_threads)),
        drafter_cpus=config.cpus_per_drafter,
        body_gpus=either(config.gpus_per_body, gpu),
        shard_gpus=either(config.gpus_per_shard, gpu),
    )


def processes_of(
    model: ModelSizes,
    configuration: EngineConfiguration,
    rows: Sequence[int],
    home: NodeResources,
    resources: RoleResources,
) -> Processes:
    """The gang of ``configuration`` whose shards own so many ``rows``, with its engine at ``home``.

    Raises ValueError where two ranks might share a GPU, which NCCL refuses.

    Body, drafter and first shard compute in turn, so that the engine needs as many CPUs, and as
    much of one GPU, as the largest of them; its samplers need theirs besides. So do a rank and its
    shard.
    """
    on_gpu = resources.body_gpus > 0
    cpus, parts = [resources.body_cpus, resources.shard_cpus], Counter[str]()
    ranks = configuration.tensor_parallel or 1
    if ranks > 1 and 0 < resources.body_gpus <= 0.5:
        raise ValueError(
            f"--gpus-per-body {resources.body_gpus:g}: no two ranks of --tensor-parallel can share "
            "a GPU: give more than 0.5"
        )
    body = body_memory(model, configuration, home.memory, on_gpu=on_gpu)
    body = tuple((name, -(-count // ranks)) for name, count in body)
    parts.update(dict(body))
    if configuration.draft not in (None, NGRAM):
        draft = read_model_sizes(configuration.draft, configuration.dtype)
        blocks = kv_blocks(model, configuration, home.memory, on_gpu=on_gpu)
        parts.update(dict(drafter_memory(draft, blocks)))
        cpus.append(resources.drafter_cpus)
    gpus = resources.shard_gpus
    shards = [
        Role(
            "shard",
            f"shard {number}",
            resources.shard_cpus,
            gpus,
            shard_memory(model, own, configuration, on_gpu=gpus > 0),
        )
        for number, own in enumerate(rows)
    ]
    parts.update(dict(shards[0].parts))
    tables = sampler_memory(model, configuration) if configuration.samplers else ()
    samplers = [
        Role("sampler", f"sampler {number}", resources.sampler_cpus, 0.0, tables)
        for number in range(configuration.samplers)
    ]
    actors = configuration.sampler_placement == "ray"
    for role in () if actors else samplers:
        parts.update(dict(role.parts))
    engine = Role(
        "engine",
        "the engine",
        max(cpus) + (0.0 if actors else sum(role.cpus for role in samplers)),
        max(resources.body_gpus, gpus),
        tuple(parts.items()),
        loading_bytes(model, configuration, on_gpu=on_gpu) // ranks,
    )
    largest = max(shards, key=lambda role: role.bytes)
    spares = range(configuration.shard_spares if len(shards) > 1 else 0)
    cpus_of_rank, gpus_of_rank = resources.body_cpus, resources.body_gpus
    besides: list[Parts] = [()] * ranks
    if configuration.shards_at_ranks:
        cpus_of_rank, gpus_of_rank = max(cpus_of_rank, resources.shard_cpus), engine.gpus
        besides = [shard.parts for shard in shards]
    return Processes(
        engine,
        tuple(
            Role("rank", f"rank {rank}", cpus_of_rank, gpus_of_rank, body + besides[rank])
            for rank in range(1, ranks)
        ),
        () if configuration.shards_at_ranks else tuple(shards[1:]),
        tuple(replace(largest, kind="spare", name=f"spare shard {number}") for number in spares),
        tuple(samplers) if actors else (),
    )


def configured_processes(
    configuration: EngineConfiguration, resources: RoleResources, home: NodeResources
) -> Processes:
    """The processes of an engine that is to run at ``home``.

    Raises what `configured_assignment` raises, and ``OSError`` for files that cannot be read.
    """
    model = read_model_sizes(configuration.model, configuration.dtype)
    rows = configured_assignment(configuration, model.vocabulary_size).rows
    return processes_of(model, configuration, rows, home, resources)


def processes_on(config: ServeConfig, nodes: Sequence[NodeResources] = ()) -> Processes:
    """`configured_processes` with what ``config`` gives each role. Where ``nodes`` are none it is
    for machines like this one, with GPUs where ``config`` says so."""
    found = nodes or [this_machine()]
    on_gpus = found[0].gpus > 0 or (not nodes and config.device == "cuda")
    resources = role_resources(config, on_gpus=on_gpus)
    return configured_processes(config.engine_configuration, resources, found[0])


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
    from lexshard.actors.index.hidden import load_tokenizer
    from lexshard.actors.text.traces import read_traces

    folder = Path(configuration.model).expanduser()
    traces = read_traces([trace], load_tokenizer(folder), vocabulary_size)
    return np.bincount(np.concatenate(traces.texts), minlength=vocabulary_size)
