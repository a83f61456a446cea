"""The output head of a loaded model: one shard with every row and the fastest screen here, or
several shards in as many processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.head.calibration import Calibrate, Timing, calibrate, choose
from lexshard.actors.head.ladder import Choices, Ladder
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.paper.paper_head import PaperHead
from lexshard.actors.head.screens import DENSE
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.shard import Shard
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.linear import fits_bfloat16, linear, pack

if TYPE_CHECKING:
    from lexshard.actors.head.sharded.recovering_head import ShardStarter
    from lexshard.actors.index.format import Index

# A smaller head is read from the cache in no time: nothing to certify would be worth a file.
SMALLEST_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class BuiltHead:
    """A head, what it is in words, and what choosing it was based on."""

    head: SequenceHead
    description: str
    timings: tuple[Timing, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def build_head(
    model: LoadedModel,
    configuration: EngineConfiguration,
    states: SequenceStates,
    choose_threads: Callable[[OutputHead], None],
    shard_starter: ShardStarter | None = None,
    calibrate: Calibrate = calibrate,
) -> BuiltHead:
    """The head that ``configuration`` asks for, of sequences with these ``states``. A certified
    head is where the body is; the paper's and a dense one are on the CPU also where the body is on
    a GPU. Several shards are started by ``shard_starter``.

    ``choose_threads`` gets a head on the CPU as soon as it can decide: before its tiers are timed,
    which ``calibrate`` does.
    Loads the model's index or builds it (see `actors.index.automatic`), which runs the body and
    takes its cache. Raises what that raises, and ValueError where clusters are missing or shards
    cannot be had.
    """
    rows = model.vocabulary_size
    weight = model.head.weight.detach()[:rows].cpu().contiguous()
    # Half the bytes, and the same products.
    weight = weight.bfloat16() if fits_bfloat16(weight) else weight
    bias = None if model.head.bias is None else model.head.bias.detach()[:rows].cpu().float()
    small = weight.numel() < SMALLEST_WEIGHTS
    choice = configuration.head
    dense_only = choice == "dense" or (choice == "auto" and small)
    if configuration.shards > 1:
        from lexshard.actors.head.sharded.build import build_sharded  # msgspec is not everywhere

        tiers = () if dense_only else configuration.tiers
        sharded = build_sharded(model, weight, bias, tiers, configuration, states, shard_starter)
        device = sharded.device
        if device.type == "cpu":
            choose_threads(sharded.head)
        name = "paper (cluster bounds), " if choice == "paper" else ""
        described = f"{name}{configuration.shards} shards, {configuration.shard_assignment}"
        return BuiltHead(sharded, described, device=device)
    if dense_only:
        dense = _shard(model, weight, bias, None)
        choose_threads(dense)
        return BuiltHead(SequenceHead(dense, states), "dense")
    # not needed, nor installed, everywhere
    from lexshard.actors.index.automatic import index_clusters, open_or_build

    if choice == "paper":
        clusters = index_clusters(model, configuration)
        head = PaperHead(
            weight, bias, model.head.softcap, model.head.scale, rows, clusters=clusters
        )
        choose_threads(head)
        return BuiltHead(SequenceHead(head, states), "paper (cluster bounds)")
    index = open_or_build(
        configuration.model, model, configuration.index, parts=["tiers"], tiers=configuration.tiers
    )
    if model.body.device.type == "cuda":
        return _on_device(model, weight, bias, index, configuration, states)
    certified = choice == "certified"
    shard = _shard(model, weight, bias, Ladder(index.tiers, ((1, configuration.tiers[0]),)))
    choose_threads(shard)
    timings = calibrate(shard, (DENSE, *index.tiers), index.hidden, configuration.max_running)
    choices = choose(timings, certified=certified)
    shard.start_with(*choices)
    described = f"certified ({_words(*choices)})"
    return BuiltHead(SequenceHead(shard, states), described, tuple(timings))


def _on_device(
    model: LoadedModel,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: Index,
    configuration: EngineConfiguration,
    states: SequenceStates,
) -> BuiltHead:
    from lexshard.actors.head.gpu.device_shard import DeviceShard  # needs Triton

    names = tuple(index.tiers)
    there = model.head.weight.detach()
    shard = DeviceShard(
        # Where it is bfloat16 already, the body's own copy, which may be the embeddings, too.
        there if there.dtype == weight.dtype else weight,
        bias,
        model.head.softcap,
        model.head.scale,
        model.vocabulary_size,
        Ladder(index.tiers, ((1, names[0]),)),
        device=model.body.device,
    )
    drafted = 0 if configuration.draft is None else configuration.draft_tokens
    step_tokens = configuration.tokens_of_a_step(model.body.device.type)
    largest = min(configuration.max_running * (1 + drafted), step_tokens)
    shard.warm_up(largest)
    timings = calibrate(shard, names, index.hidden, configuration.max_running)
    choices = choose(timings, certified=True)
    shard.start_with(*choices)
    shard.warm_up(largest)  # of sizes that were not timed
    description = f"certified ({_words(*choices)}), on the GPU"
    head = SequenceHead(shard, states)
    return BuiltHead(head, description, tuple(timings), model.body.device)


def _shard(
    model: LoadedModel, weight: torch.Tensor, bias: torch.Tensor | None, ladder: Ladder | None
) -> Shard:
    """The row kernel is the dense screen: half the bytes of fp32 for bf16 weights, and four to six
    times as fast as torch at one row."""
    return Shard(
        weight,
        bias,
        softcap=model.head.softcap,
        scale=model.head.scale,
        vocabulary_size=model.vocabulary_size,
        linear=partial(linear, weight=pack(weight)),
        ladder=ladder,
    )


def _words(choices: Choices, for_several: Choices) -> str:
    one, several = (
        ", ".join(name if rows == 1 else f"{name} from {rows} rows on" for rows, name in each)
        for each in (choices, for_several)
    )
    return one if several == one else f"{one}; for top-k {several}"
