"""More GPUs than are here, as a formula: how many could share a replica, and what that would give.

Two GPUs were never measured: it says what a plan can count on, and what bounds it. A step reads the
weights and the keys and values of all sequences once, each rank its part; ranks add up their sums
twice a layer, each of which NCCL sends around a ring in the weights' own type:

    step(rows) = bytes / (ranks * memory)
                 + (2 L + 1) * (hop + 2 (ranks - 1) / ranks * weight bytes * d * rows / link)
                 + 5 hops of the head's shards, one on each rank

Published are the GPUs' memory and its bandwidth, the links and NCCL's latencies (docs/findings.md);
the share of the bandwidth that a step gets was measured on one GPU of each type (docs/gpu.md), and
what the CPUs beside have to do is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lexshard.actors.configuration import GPU_TIER
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.cluster.models.progress import in_units
from lexshard.cluster.topology.nodes import USABLE_SHARE
from lexshard.cluster.topology.sizes import ModelSizes, tier_row_bytes
from lexshard.cluster.topology.tables import table

GPUS_OF_A_NODE = 8
RANKS = (1, 2, 4, 8)  # within a node
LINK = 450e9  # bytes a second to the others of a node, NVLink 4
HOP, HOP_OF_A_LEVEL = 6.8e-6, 0.6e-6  # seconds
HEAD_HOPS = 5
# Seconds of a CPU for a token, measured: ingress and API process at 32 streams (docs/serving.md),
# and a sampler with all controls (README).
FRONT, DECISION = 48e-6, 8e-6


@dataclass(frozen=True, slots=True)
class Gpu:
    """Its memory in bytes, how many of them it reads a second, and the share of these that a step
    of an 8B model's shape read, with all that it launches."""

    memory: float
    bandwidth: float
    share: float


GPUS = {"h100": Gpu(80e9, 3.35e12, 0.71), "h200": Gpu(141e9, 4.8e12, 0.65)}


@dataclass(frozen=True, slots=True)
class Forecast:
    """``replicas`` of so many ``ranks`` with at most ``sequences`` each: the bytes on a GPU without
    its cache, seconds of a step of one sequence and of all, bytes that a rank sends for a token."""

    gpus: int
    ranks: int
    replicas: int
    sequences: int
    gpu_bytes: float
    one: float
    full: float
    sent: float

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas, each full."""
        return self.replicas * self.sequences / self.full

    @property
    def cpus(self) -> float:
        """That are busy with HTTP and decisions then."""
        return (FRONT + DECISION) * self.tokens_per_second


def forecast(
    model: ModelSizes, gpus: int, ranks: int, gpu: Gpu, *, context: int, most: int
) -> Forecast | None:
    """What ``ranks`` a replica would give on ``gpus``, with up to ``most`` sequences of ``context``
    tokens in each; None where the model, its head's screen and one of them do not fit."""
    if gpus < ranks:
        return None
    screen = model.vocabulary_size * tier_row_bytes(GPU_TIER, model.hidden_size)
    held = (model.parameters * model.weight_bytes + screen) / ranks
    # Where there are fewer key-value heads than ranks, several have one.
    of_token = model.kv_block_bytes(on_gpu=True) / BLOCK_TOKENS / min(ranks, model.kv_heads)
    sequences = min(most, int((USABLE_SHARE * gpu.memory - held) / (context * of_token)))
    if sequences < 1:
        return None
    layers = model.parameters - model.embedding_parameters - model.output_parameters
    read = (layers * model.weight_bytes + screen) / ranks
    levels = int(math.log2(ranks))
    exchanges = 2 * model.layers + 1
    # Of an exchange, to the next rank of the ring.
    row_bytes = 2 * (ranks - 1) / ranks * model.weight_bytes * model.hidden_size
    hop = HOP + levels * HOP_OF_A_LEVEL

    def step(rows: int) -> float:
        reading = (read + rows * context * of_token) / (gpu.share * gpu.bandwidth)
        if ranks == 1:
            return reading
        return reading + exchanges * (hop + rows * row_bytes / LINK) + HEAD_HOPS * hop

    return Forecast(
        gpus,
        ranks,
        gpus // ranks,
        sequences,
        held,
        step(1),
        step(sequences),
        exchanges * row_bytes,
    )


def forecasts(
    model: ModelSizes, counts: Sequence[int], name: str, *, context: int, most: int
) -> list[Forecast]:
    """Of every number of GPUs of the type ``name``, with all numbers of ranks that hold the model.

    Raises ValueError where none does.
    """
    found: list[Forecast] = []
    for gpus in counts:
        every = (
            forecast(model, gpus, ranks, GPUS[name], context=context, most=most) for ranks in RANKS
        )
        own = [each for each in every if each is not None]
        if not own:
            raise ValueError(
                f"{gpus} GPUs of the type {name}, at most {RANKS[-1]} to a replica, do not hold "
                f"{model.name} and a sequence of {context:,} tokens: give more, or less --context"
            )
        found += own
    return found


def describe(model: ModelSizes, found: Sequence[Forecast], name: str, context: int) -> str:
    """A table of every number of GPUs, and what the loss of one takes."""
    lines = [f"A MODEL, not a measurement: {model.name} on {name.upper()}"]
    lines.append(f"{model.parameters:,} parameters, {context:,} tokens of context a sequence")
    for gpus in dict.fromkeys(each.gpus for each in found):
        own = [each for each in found if each.gpus == gpus]
        lines += ["", f"{gpus:,} GPUs, nodes of {GPUS_OF_A_NODE}: {_nodes(gpus)}"]
        lines += [*_rows(own), _lost(own)]
    lines += [
        "",
        "* the best. Each rank has a shard of the head beside it, and what is sent goes over the",
        "links of its node; between nodes nothing is sent for a token. Not in it: what the host",
        "does, draws that need every logit. Sums of several GPUs were never measured.",
    ]
    return "\n".join(lines)


def _rows(found: Sequence[Forecast]) -> list[str]:
    quickest = min(found, key=lambda each: each.one)
    busiest = max(found, key=lambda each: each.tokens_per_second)
    rows = [
        [
            str(each.ranks),
            f"{each.replicas:,}",
            f"{each.sequences:,}",
            in_units(int(each.gpu_bytes)),
            f"{1e3 * each.one:.2f}{'*' if each is quickest else ' '}",
            f"{1e3 * each.full:.1f}",
            f"{each.tokens_per_second:,.0f}{'*' if each is busiest else ' '}",
            in_units(int(each.sent)),
            f"{each.cpus:,.0f}",
        ]
        for each in found
    ]
    names = "ranks and shards,replicas,sequences of each,weights of a GPU,ms/token alone,"
    return table(names + "full,tokens/s of all,sent by a rank per token,CPUs", *rows)


def _lost(found: Sequence[Forecast]) -> str:
    """What part of the tokens is missing until what is lost is back."""

    def part(count: int) -> str:
        return "all" if count == 1 else f"1/{count}"

    most, fewest = found[0].replicas, found[-1].replicas
    of_gpu = part(most) if most == fewest else f"{part(most)} to {part(fewest)}"
    of_node = part(_nodes(found[0].gpus))
    return (
        f"  lost: a GPU, its rank or its shard {of_gpu} (its replica forms again, its sequences are"
        f" computed anew), a node {of_node} (streams of its API processes break), a sampler none"
        " (its sequences move to the others), Ray's head all"
    )


def _nodes(gpus: int) -> int:
    return -(-gpus // GPUS_OF_A_NODE)
