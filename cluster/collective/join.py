"""From a plan that all processes of a group share to this one's `Collective`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import Store

from lexshard.actors.collective import ROOT, Collective
from lexshard.cluster.collective.gloo_links import GlooLinks, open_store
from lexshard.cluster.collective.nccl_links import CupyGroup, NcclLinks
from lexshard.cluster.collective.star import StarCollective
from lexshard.cluster.ports import own_address


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group of ``size`` that meets at the root's ``host`` and ``port`` under ``name``, which no
    other group there has had.

    ``seconds`` is how long one may keep another waiting in a step, ``forming_seconds`` how long all
    may take to come. Messages go over TCP by gloo; hidden states by NCCL where every process has a
    GPU of its own (``nccl``).
    """

    name: str
    size: int
    host: str
    port: int
    seconds: float
    forming_seconds: float = 60.0
    nccl: bool = False


def join(
    plan: GroupPlan, rank: int, *, store: Store | None = None, device: torch.device | None = None
) -> Collective:
    """The group of ``plan`` as its process ``rank`` sees it, all connections open.

    ``store`` is the root's (`gloo_links.open_store`), opened before the plan was made, for its
    port; ``device`` is this process' GPU. Raises ValueError for a plan that cannot be followed and
    `CollectiveTimeoutError` where not all come in time.
    """
    if plan.nccl and (device is None or device.type != "cuda"):
        raise ValueError("a group with NCCL needs the CUDA device of every process")
    if store is None:
        store = open_store(plan.host, plan.port, plan.forming_seconds, root=rank == ROOT)
    links = GlooLinks(
        store,
        plan.name,
        rank,
        plan.size,
        address=own_address(plan.host, plan.port),
        forming_seconds=plan.forming_seconds,
    )
    carried = None
    if plan.nccl and device is not None:
        connect = partial(CupyGroup, store, f"{plan.name}-nccl", rank, plan.size)
        carried = NcclLinks(connect, device, plan.seconds, plan.forming_seconds)
    collective: Collective = StarCollective(links, plan.seconds, carried)
    collective.barrier()
    return collective
