"""Hidden states by NCCL, in the group of one that a single GPU allows, and its refusals."""

from __future__ import annotations

import pytest
import torch

from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.cluster.collective.nccl_links import NcclLinks, torch_nccl

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA device")


@pytest.mark.gpu
@ON_GPU
def test_a_group_of_one_broadcasts_on_its_device() -> None:
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    device = torch.device("cuda", 0)
    bites: list[str] = []
    links = NcclLinks(torch_nccl(store, "one", 0, 1), device, 10.0, bite=bites.append)
    hidden = torch.randn(16, 4096, device=device)
    before = hidden.clone()
    for _ in range(20):
        links.broadcast(hidden)
    torch.cuda.synchronize(device)
    assert torch.equal(hidden, before)
    links.close()
    assert bites == []


def test_a_plan_with_nccl_needs_a_gpu_of_every_process() -> None:
    plan = GroupPlan("no-gpu", 2, "127.0.0.1", 1, seconds=1.0, nccl=True)
    with pytest.raises(ValueError, match="CUDA device of every process"):
        join(plan, 0, device=torch.device("cpu"))
