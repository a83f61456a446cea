"""What a step of decoding asks of a GPU, and that nothing in it waits, told without one.

The engine's own code runs: the body in its graphs, the head, and what begins a step from the tokens
that the device drew. Tensors of the GPU have a shape and no memory, so no value of theirs can be
read; graphs, streams and events are stand-ins. For a process of its own, since torch and Triton are
told of a GPU:

    python -m tests.support.step_launches MODEL

prints what two steps ask for, a line each: one whose tokens the search alone draws, and one with
penalties and a nucleus.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.capture import CudaCapture
from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.head.gpu.device_shard import DeviceShard
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.kernels.quantize import quantize
from tests.support.compile_only import AbsentGpu

# The host has no number. A torch that is built without CUDA indexes nothing on "cuda".
GPU = torch.device("cpu", 0)
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "searched": ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 20}, {"temperature": 0.9}),
    "adjusted": (
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_k": 20, "frequency_penalty": 0.5, "logit_bias": ((9, 2.0),)},
        {"temperature": 0.9, "top_p": 0.9},
    ),
}
# Neither launched nor waited for.
SILENT = ("device", "empty", "empty_like", "empty_strided", "new_empty", "detach", "alias")

_copy_on_the_host = torch.Tensor.copy_


class Gpu(TorchDispatchMode):
    """A GPU that computes nothing, for tensors on `GPU`; ``asked`` is what is launched, in order.

    A value of a tensor cannot be read. While it is ``watched``, what else would make the host wait
    raises RuntimeError: a copy that is not asynchronous, or from or to memory that is not pinned,
    and a host's tensor among those of an operator, which would be copied first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.watched = False
        self._tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, torch.Tensor] = {}  # kept, so that none has its address after it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        pinned = options.pop("pin_memory", False)
        there = any(isinstance(each, FakeTensor) for each in tree_leaves((args, options)))
        if not there and options.get("device") != GPU:
            result = func(*args, **options)
            return self.pin(result) if pinned else result
        if name == "_to_copy":
            source, device = args[0], options.get("device") or args[0].device
            self._check(source, device, source, options.get("non_blocking", False))
        if not func.is_view and name not in SILENT:
            self.asked.append(name)
            if self.watched and name != "_to_copy" and any(map(_is_on_the_host, tree_leaves(args))):
                raise RuntimeError(f"the host waits for its tensor to be copied for {func}")
        with self._tensors:
            return func(*args, **options)

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """`torch.Tensor.copy_`, which writes nothing where one of the two has no memory."""
        if not isinstance(target, FakeTensor) and not isinstance(source, FakeTensor):
            return _copy_on_the_host(target, source, non_blocking)
        host = source if isinstance(target, FakeTensor) else target
        self._check(source, target.device, host, non_blocking)
        self.asked.append("copy_")
        return target

    def _check(
        self, source: torch.Tensor, device: torch.device, host: torch.Tensor, asynchronous: bool
    ) -> None:
        if not self.watched or source.device == device:
            return
        fake = isinstance(host, FakeTensor)
        if fake or not asynchronous or host.untyped_storage().data_ptr() not in self._pinned:
            raise RuntimeError(f"the host waits for a copy from {source.device} to {device}")


def _is_on_the_host(value: object) -> bool:
    """A number of Python's travels with the launch; a tensor of many does not."""
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.dim() > 0


class _Graph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.launches = 0
        self.asked: list[str] = []

    def replay(self) -> None:
        self.asked.append(f"a graph of {self.launches} launches")


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None:
        raise RuntimeError("the host waits for an event")


class _Stream:
    device_index = 0

    def wait_stream(self, other: object) -> None: ...


@contextmanager
def on(gpu: Gpu) -> Iterator[None]:
    """With torch and Triton told of ``gpu``."""

    @contextmanager
    def recording(graph: _Graph, **options: Any) -> Iterator[None]:
        before = len(gpu.asked)
        yield
        graph.launches, graph.asked = len(gpu.asked) - before, gpu.asked
        del gpu.asked[before:]

    @contextmanager
    def stream(which: object) -> Iterator[None]:
        yield

    def launched(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: gpu.asked.append(kernel.__name__)

    driver.set_active(AbsentGpu())  # type: ignore[arg-type]
    with ExitStack() as patches:
        for target, name, value in (
            (torch.cuda, "CUDAGraph", _Graph),
            (torch.cuda, "graph", recording),
            (torch.cuda, "Event", _Event),
            (torch.cuda, "Stream", lambda device=None: _Stream()),
            (torch.cuda, "current_stream", _Stream),
            (torch.cuda, "stream", stream),
            (torch.cuda, "graph_pool_handle", object),
            (torch.Tensor, "is_cuda", property(lambda tensor: isinstance(tensor, FakeTensor))),
            (torch.Tensor, "pin_memory", lambda tensor: gpu.pin(tensor)),
            (torch.Tensor, "copy_", lambda *all_of, **options: gpu.copy(*all_of, **options)),
            (JITFunction, "__getitem__", launched),
        ):
            patches.enter_context(patch.object(target, name, value))
        with gpu:
            yield


def decoding_engine(folder: str, kinds: tuple[dict[str, Any], ...]) -> Engine:
    """An engine on the host, each of whose sequences has drawn a token."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "body": "general"}
    engine = Engine(EngineConfiguration(folder, head="dense", threads=1, **settings))
    for row, kind in enumerate(kinds):
        parameters = SamplingParameters(max_tokens=20, ignore_eos=True, seed=row, **kind)
        engine.submit(Request(str(row), 0, (5, 9, 7 + row), parameters))
    while engine.statistics().generated_tokens < len(kinds):
        engine.step()
    return engine


def step_asks(gpu: Gpu, folder: str, engine: Engine) -> list[str]:
    """What a step of ``engine`` asks for, whose body and head are on ``gpu`` from here on."""
    weight = engine.model.head.weight.detach().float()
    tier = quantize(weight, "int8")
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(GPU)
    body = GraphedBody(
        GeneralBody(model.eval().requires_grad_(False), invariant=False), CudaCapture
    )
    body.allocate_cache(64)
    steps = engine.steps
    steps._model = replace(engine.model, body=body)
    steps._head_device = GPU
    steps._head.head = DeviceShard(weight, None, None, 1.0, len(weight), tier, device=GPU)
    plan = steps.plan()
    assert plan is not None
    begun = steps._begin(plan)  # makes the graphs, too
    gpu.asked.clear()
    gpu.watched = True
    assert steps._follow(begun) is not None
    gpu.watched = False
    return list(gpu.asked)


def main() -> None:
    for name, kinds in KINDS.items():
        engine, gpu = decoding_engine(sys.argv[1], kinds), Gpu()
        with on(gpu):
            print(f"{name}:", *step_asks(gpu, sys.argv[1], engine), sep="; ")


if __name__ == "__main__":
    main()
