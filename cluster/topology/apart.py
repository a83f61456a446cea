"""What a configuration asks for, found out in a process that ends with the answer: what reads a
model takes hundreds of megabytes, which a server's driver would keep."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.topology.nodes import NodeResources
from lexshard.cluster.topology.processes import Processes


def processes_apart(config: ServeConfig, nodes: Sequence[NodeResources] = ()) -> Processes:
    """See `cluster.topology.configured.processes_on`; raises what `configured_processes` there
    raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_processes, config, tuple(nodes)).result()


def _processes(config: ServeConfig, nodes: tuple[NodeResources, ...]) -> Processes:
    from lexshard.cluster.topology.configured import processes_on

    return processes_on(config, nodes)
