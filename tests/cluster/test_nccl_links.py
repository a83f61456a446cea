"""Hidden states by NCCL: in the group of one that a single GPU allows, and what is asked of it."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.cluster.collective.nccl_links import (
    CupyGroup,
    NcclLinks,
    is_each_apart,
    own_gpu,
)
from lexshard.cluster.collective.rank_sums import NcclSums

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA device")


@pytest.mark.gpu
@ON_GPU
def test_a_group_of_one_broadcasts_on_its_device() -> None:
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    device = torch.device("cuda", 0)
    bites: list[str] = []
    connect = partial(CupyGroup, store, "one", 0, 1)
    links = NcclLinks(connect, device, 10.0, bite=bites.append)
    hidden = torch.randn(16, 4096, device=device)
    before = hidden.clone()
    for _ in range(20):
        links.broadcast(hidden)
    torch.cuda.synchronize(device)
    assert torch.equal(hidden, before)
    links.close()
    assert bites == []


@pytest.mark.gpu
@ON_GPU
def test_a_graph_replays_sums_of_a_group_of_one() -> None:
    """That NCCL can be recorded, and ends."""
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    sums = NcclSums(CupyGroup(store, "graph", 0, 1), 10.0)
    values = torch.ones(64, 4096, dtype=torch.bfloat16, device="cuda:0")
    sums.add(values)
    assert sums.complete()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        values.mul_(2.0)
        sums.add(values)
    for _ in range(3):
        graph.replay()
    assert sums.complete()
    assert torch.equal(values, torch.full_like(values, 8.0))
    sums.abort()


def test_a_plan_with_nccl_needs_a_gpu_of_every_process() -> None:
    plan = GroupPlan("no-gpu", 2, "127.0.0.1", 1, seconds=1.0, nccl=True)
    with pytest.raises(ValueError, match="CUDA device of every process"):
        join(plan, 0, device=torch.device("cpu"))


class FakeNccl(ModuleType):
    """What `cupy.cuda.nccl` has, in memory: what communicators were made of and asked for."""

    NCCL_FLOAT16, NCCL_FLOAT32, NCCL_SUM = 6, 7, 0

    def __init__(self, identity: bytes | tuple[int, ...] = bytes(range(128))) -> None:
        super().__init__("cupy.cuda.nccl")
        self.identity = identity
        self.made: list[tuple[int, bytes | tuple[int, ...], int]] = []
        self.asked: list[tuple[int, ...]] = []
        self.aborted = threading.Event()

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        return self.identity

    def NcclCommunicator(self, *made: Any) -> Any:  # noqa: N802
        self.made.append(made)
        return SimpleNamespace(
            bcast=lambda *asked: self.asked.append(asked),
            allReduce=lambda *asked: self.asked.append(asked),
            abort=self.aborted.set,
        )


def install(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of cupy's, with a stream of number 11."""
    cuda = ModuleType("cupy.cuda")
    cuda.nccl = nccl  # type: ignore[attr-defined]
    for name, module in (("cupy", ModuleType("cupy")), ("cupy.cuda", cuda)):
        monkeypatch.setitem(sys.modules, name, module)
    stream = SimpleNamespace(cuda_stream=11)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


@pytest.mark.parametrize("identity", [bytes(range(128)), tuple(range(-64, 64))])
def test_all_ranks_make_a_communicator_of_the_roots_identity_and_broadcast_in_its_stream(
    identity: bytes | tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, as cupy 14 wants them, or integers, as those before did."""
    nccl = FakeNccl(identity)
    install(nccl, monkeypatch)
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    others = {rank: open_store("127.0.0.1", store.port, 60.0, root=False) for rank in (1, 2)}
    ranks = [
        threading.Thread(target=CupyGroup, args=(own, "three", rank, 3))
        for rank, own in others.items()
    ]
    for each in ranks:
        each.start()
    hidden = torch.zeros(2, 4)
    CupyGroup(store, "three", 0, 3).broadcast(hidden)
    for each in ranks:
        each.join(60)
    assert sorted(nccl.made, key=lambda made: made[2]) == [(3, nccl.identity, n) for n in range(3)]
    assert nccl.asked == [(hidden.data_ptr(), 8, nccl.NCCL_FLOAT32, 0, 11)]


@pytest.mark.parametrize("done", [True, False])
def test_a_group_that_ends_is_aborted(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits would spin in the stream of the next group for good, and a communicator's own end
    waits for others, who may have gone."""
    nccl = FakeNccl()
    install(nccl, monkeypatch)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda count, device: torch.ones(count))
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    connect = partial(CupyGroup, store, "two", 0, 2)
    links = NcclLinks(connect, torch.device("cuda", 0), 60.0)
    links.broadcast(torch.ones(3))
    assert not nccl.aborted.is_set()
    links.close()
    links.close()
    assert nccl.aborted.is_set()
    assert [count for _, count, *_ in nccl.asked] == [1, 3]


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, 7), (torch.bfloat16, 9), (torch.float16, 6)]
)
def test_sums_of_ranks_are_nccls_in_place_and_in_the_current_stream(
    dtype: torch.dtype, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = FakeNccl()
    install(nccl, monkeypatch)
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    values = torch.zeros(3, 5, dtype=dtype)
    CupyGroup(store, "sums", 0, 1).add(values)
    place = values.data_ptr()
    assert nccl.asked == [(place, place, 15, kind, nccl.NCCL_SUM, 11)]


class Waiting:
    """A device's event that happens when it is told to."""

    def __init__(self) -> None:
        self.happens = threading.Event()

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None:
        assert self.happens.wait(60)


def test_a_step_whose_rank_is_gone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the end of the group ends it on the device; hidden states are then anything."""
    nccl, event = FakeNccl(), Waiting()
    install(nccl, monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    store = open_store("127.0.0.1", 0, 60.0, root=True)
    sums = NcclSums(CupyGroup(store, "ranks", 0, 2), 0.2)
    event.happens.set()
    sums.add(torch.zeros(1))
    assert sums.complete()
    event.happens.clear()
    threading.Thread(target=lambda: nccl.aborted.wait(60) and event.happens.set()).start()
    sums.add(torch.zeros(1))
    assert not sums.complete()
    with pytest.raises(RankLostError):
        sums.add(torch.zeros(1))
    sums.abort()
    assert len(nccl.asked) == 2


def test_nccl_carries_where_every_process_has_a_gpu_of_its_own() -> None:
    assert is_each_apart(["a", "b", "c"])
    assert not is_each_apart(["a", "b", "a"])
    assert not is_each_apart(["a", None])
    assert own_gpu(torch.device("cpu")) is None
