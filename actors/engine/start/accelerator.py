"""What a GPU is, what it has left, and how things run there."""

from __future__ import annotations

import numpy as np
import torch

from lexshard.actors.body.batch import Body, BodyOfDevices, whole_text
from lexshard.actors.body.gpu.graphed_body import LARGEST_GRAPH
from lexshard.actors.engine.start.memory import DeviceMemory
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.kernels.processor import instructions


def processor_of(body: Body) -> str:
    """What the bits of ``body`` may depend on: a CPU's instructions, a GPU by its name."""
    if body.device.type == "cpu":
        return instructions()
    return torch.cuda.get_device_name(body.device)


def describe_device(body: Body) -> str:
    """The GPU of ``body`` in words; nothing where it is on a CPU."""
    if body.device.type == "cpu":
        return ""
    name = torch.cuda.get_device_name(body.device)
    memory = DeviceMemory(*torch.cuda.mem_get_info(body.device))
    return in_words(name, memory, body)


def in_words(name: str, memory: DeviceMemory, body: Body) -> str:
    """``name``, its memory, what is in graphs, and which attention there is."""
    steps = "without CUDA graphs; attention by Triton"
    if isinstance(body, BodyOfDevices):
        steps = body.description
    size, free = memory.total / 2**30, memory.free / 2**30
    return f"{name}, {size:.1f} GiB ({free:.1f} left); {steps}"


def measure_device(body: Body, rows: int) -> DeviceMemory:
    """What a GPU has left once weights, head, the largest step's activations and those of a graph
    are on it.

    Runs ``body`` on a step of ``rows`` tokens, whose memory stays with torch, ready for the next
    such step, and on the largest one that is a graph: those of smaller steps share its memory.
    Takes the cache of ``body``.
    """
    torch.cuda.synchronize(body.device)
    torch.cuda.empty_cache()  # what loading and measuring took for a moment
    rows = min(rows, body.max_positions)
    body.allocate_cache(-(-rows // BLOCK_TOKENS))
    for count in dict.fromkeys((rows, min(rows, LARGEST_GRAPH))):
        body.forward(whole_text([0] * count, np.array([count - 1], np.int32)))
    if isinstance(body, BodyOfDevices):
        return DeviceMemory(*body.memory())
    torch.cuda.synchronize(body.device)
    return DeviceMemory(*torch.cuda.mem_get_info(body.device))
