"""From a model folder to a body on several ranks.

No process holds the model, so that it cannot be compared with transformers' own forward pass as a
whole. Its first layers can: every layer is made in the same way of weights of the same names. What
was found is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from lexshard.actors.body.checkpoint import Checkpoint, read_checkpoint
from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.actors.body.fused import EMBEDDING, layer_kinds, plan_of
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.head_weights import HeadWeights, check_head, narrowed, read_head
from lexshard.actors.body.loading import (
    ROUNDED,
    LoadedModel,
    check_layers_shared,
    checked_fused_body,
    choose_device,
    dtype_of_weights,
    memory_of,
    read_model,
)
from lexshard.actors.body.model_code import without_a_word
from lexshard.actors.body.parallel.checks import check_folder_shared, check_shared
from lexshard.actors.body.parallel.general_rank import FastLayers, GeneralRank
from lexshard.actors.body.parallel.messages import RankPart
from lexshard.actors.body.parallel.parallel_body import NoOthers, OtherRanks, ParallelBody
from lexshard.actors.body.parallel.rank import BodyRank
from lexshard.actors.body.parallel.share import RankShare
from lexshard.actors.body.parallel.side_by_side import SideBySide
from lexshard.actors.body.parallel.slices import StoredSlices, slices_of
from lexshard.actors.body.parallel.sums import OneRank, RankGroup
from lexshard.actors.body.proven import (
    ProvenModel,
    head_name_of,
    reads_the_same,
    recall_proven,
    remember_proven,
)
from lexshard.actors.body.refusals import check_memory, check_stored_types, model_class
from lexshard.actors.body.self_test import (
    TOLERANCES,
    Expected,
    check_body,
    plain_forward,
    run_alone,
)
from lexshard.actors.stored_tensors import stored_tensors
from lexshard.kernels.linear import Arithmetic
from lexshard.kernels.parallel import alone

# Layers that are compared at least: one that follows on another, and one of every kind.
COMPARED_LAYERS = 2
_WAY = "parallel"  # as what a load is remembered

# Starts the processes of all ranks but the first.
StartRanks = Callable[[Sequence[RankPart]], OtherRanks]


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How a model is loaded on ``ranks`` ranks: see `actors.body.loading.load`. On a CPU ranks are
    compiled stacks, or with ``body`` "general" decoders of torch, as they are on GPUs."""

    ranks: int
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    body: Literal["auto", "general", "fused"] = "auto"
    attention: Literal["auto", "triton"] = "triton"
    device: str = "cpu"
    batch_invariant: bool = False
    compiled: bool = True


def load_parallel(
    path: str | Path, options: ParallelOptions, start: StartRanks | None
) -> LoadedModel:
    """The model in a local folder, its body on several ranks, of which the first is here.

    Raises what `actors.body.loading.load` and ``start`` raise, and ValueError without a ``start``
    where there are others to start.
    """
    folder, ranks = Path(path).expanduser(), options.ranks
    check_folder_shared(folder, ranks)
    if ranks > 1 and start is None:
        raise ValueError("a parallel body needs processes for its other ranks: give start_ranks")
    place = choose_device(options.device)
    if place.type == "cpu" and options.body != "general":
        return _load_stacks(folder, options, start)
    return _load_decoders(folder, options, place, start)


def _load_stacks(folder: Path, options: ParallelOptions, start: StartRanks | None) -> LoadedModel:
    proven = recall_proven(folder, options.dtype, _WAY)
    if proven is None:
        first = _first_layers_of(folder, options.dtype, torch.device("cpu"))
        proven = _prove(first)
        if not remember_proven(folder, proven, first.model, options.dtype, _WAY):
            raise _other_weights(folder)
    parts = _parts(folder, proven, options.ranks)
    body = _started(proven, parts, start, alone())
    body.batch_invariant = proven.batch_invariant
    return _loaded(folder, proven, body)


def _load_decoders(
    folder: Path, options: ParallelOptions, place: torch.device, start: StartRanks | None
) -> LoadedModel:
    if options.batch_invariant and place.type != "cpu":
        raise ValueError(
            "on GPUs --tensor-parallel adds in an order of NCCL's own, so that rows depend on "
            "those beside them: leave --batch-invariant out"
        )
    if options.ranks > 1 and place.type != "cpu" and find_spec("cupy") is None:
        raise ValueError(
            "--tensor-parallel on GPUs adds by NCCL through cupy, which is not installed: pip "
            f"install cupy-cuda{str(torch.version.cuda).split('.')[0]}x"
        )
    first = _first_layers_of(folder, options.dtype, place)
    proven = _prove_side_by_side(first, options.ranks)
    if not reads_the_same(folder, proven, first.model):
        raise _other_weights(folder)
    check_memory(
        proven.parameters * getattr(torch, proven.dtype).itemsize // options.ranks,
        memory_of(place),
    )
    fast = FastLayers(options.compiled, flash=options.attention == "auto")
    parts = [
        replace(part, device=_device_of(place, part.rank), fast=fast)
        for part in _parts(folder, proven, options.ranks)
    ]
    del first  # before this rank takes its memory
    body = _started(proven, parts, start, OneRank())
    body.batch_invariant = proven.batch_invariant
    return _loaded(folder, proven, body)


def _other_weights(folder: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the files in {folder} hold other weights, or under other names, than transformers makes "
        "of them, and ranks read them from there: leave --tensor-parallel out"
    )


def _device_of(place: torch.device, rank: int) -> str:
    """GPUs follow on that of the first rank. Where a process sees its own alone, its starter says
    so."""
    return "cpu" if place.type == "cpu" else f"cuda:{(place.index or 0) + rank}"


def _parts(folder: Path, proven: ProvenModel, ranks: int) -> list[RankPart]:
    plan = proven.plan
    described = {
        "model_type": plan.family,
        "hidden_size": plan.shape.hidden,
        "num_attention_heads": plan.shape.heads,
        "num_key_value_heads": plan.shape.kv_heads,
        "head_dim": plan.shape.head_dim,
        "intermediate_size": plan.shape.intermediate,
    }
    check_shared(described, ranks)
    vocabulary = _embedding_rows(folder)
    return [
        RankPart(str(folder), proven.dtype, proven.plan, rank, ranks, vocabulary, proven.head_name)
        for rank in range(ranks)
    ]


def _started(
    proven: ProvenModel, parts: Sequence[RankPart], start: StartRanks | None, alone: RankGroup
) -> ParallelBody:
    others = NoOthers(alone) if start is None or len(parts) == 1 else start(parts[1:])
    try:
        return ParallelBody(proven.plan, parts[0].build(), others)
    except BaseException:
        others.close()
        raise


def _loaded(folder: Path, proven: ProvenModel, body: ParallelBody) -> LoadedModel:
    output = StoredSlices(folder, getattr(torch, proven.dtype))(proven.head_name)
    if output is None:
        raise KeyError(proven.head_name)
    weight = narrowed(output).to(body.device)
    return LoadedModel(
        body=body,
        head=HeadWeights(weight, None, proven.softcap, proven.head_scale),
        dtype=proven.dtype,
        vocabulary_size=proven.vocabulary_size,
        eos_token_ids=proven.eos_token_ids,
        default_sampling=proven.default_sampling,
        max_positions=proven.plan.max_positions,
        parameters=proven.parameters,
    )


@dataclass(frozen=True, slots=True, eq=False)
class FirstLayers:
    """The first layers of a ``checkpoint``, as transformers computes them."""

    checkpoint: Checkpoint
    model: Any
    dtype: torch.dtype
    head: HeadWeights
    head_name: str
    expected: Expected

    @property
    def arithmetic(self) -> Arithmetic:
        return "bfloat16" if self.dtype == torch.bfloat16 else "float32"

    def proven(self, *, batch_invariant: bool) -> ProvenModel:
        """What is known of the whole model when its first layers were found to be right."""
        checkpoint, rows = self.checkpoint, self.head.weight.shape[0]
        return ProvenModel(
            plan=plan_of(self.model, self.arithmetic, checkpoint.config),
            batch_invariant=batch_invariant,
            head_name=self.head_name,
            head_scale=self.head.scale,
            softcap=self.head.softcap,
            dtype=str(self.dtype).removeprefix("torch."),
            vocabulary_size=min(rows, checkpoint.tokenizer_size or rows),
            eos_token_ids=checkpoint.eos_below(rows),
            default_sampling=checkpoint.default_sampling,
            parameters=checkpoint.parameters,
        )


def _first_layers_of(folder: Path, dtype: str, place: torch.device) -> FirstLayers:
    """Raises a ModelRefusedError for what ranks do not share, or what computes otherwise than it
    says."""
    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    kind = model_class(config)
    check_stored_types(checkpoint.stored_dtypes)
    check_layers_shared(config)
    weights_dtype = dtype_of_weights(dtype, checkpoint.stored_dtypes, place)
    with without_a_word():
        model = read_model(kind, _first_layers(checkpoint), weights_dtype, place)
    head_name = head_name_of(model)
    if head_name is None:
        raise UnsupportedModelError(
            f"the output weights of this {config.model_type} have a bias or an unknown name, which "
            "--tensor-parallel does not read: leave it out"
        )
    head = read_head(model)
    expected = plain_forward(model)
    exact = TOLERANCES[torch.float32 if place.type == "cpu" else weights_dtype]
    for hidden, logits in zip(expected.hidden, expected.logits, strict=True):
        check_head(head, hidden, logits, exact)
    return FirstLayers(checkpoint, model, weights_dtype, head, head_name, expected)


def _prove(first: FirstLayers) -> ProvenModel:
    """Compares a compiled stack of the first layers, in this process."""
    model, expected, arithmetic = first.model, first.expected, first.arithmetic
    exact, weights = TOLERANCES[torch.float32], slices_of(model)
    checked_fused_body(model, weights, arithmetic, expected, exact)
    plan = plan_of(model, arithmetic)
    whole = RankShare(0, 1, plan.shape, model.get_input_embeddings().weight.shape[0])
    body = ParallelBody(plan, BodyRank(plan, whole, weights), NoOthers(alone()))
    ours = run_alone(GeneralBody(model, pack_linears=False), expected.token_ids)
    rounds = arithmetic == "bfloat16"
    invariant = check_body(
        body,
        expected.token_ids,
        ours,
        "the general body",
        ROUNDED if rounds else exact,
        typical=rounds,
    )
    return first.proven(batch_invariant=invariant)


def _prove_side_by_side(first: FirstLayers, ranks: int) -> ProvenModel:
    """Compares decoders of the first layers of which each has its part, in threads."""
    model, expected = first.model, first.expected
    shape = plan_of(model, first.arithmetic).shape
    rows = model.get_input_embeddings().weight.shape[0]
    weights = slices_of(model)
    with without_a_word():
        made = [
            GeneralRank(
                model.config,
                RankShare(rank, ranks, shape, rows),
                weights,
                first.dtype,
                model.device,
            )
            for rank in range(ranks)
        ]
    invariant = check_body(
        SideBySide(made),
        expected.token_ids,
        expected.hidden,
        "the plain forward pass",
        TOLERANCES[first.dtype],
    )
    return first.proven(batch_invariant=invariant and model.device.type == "cpu")


def _first_layers(checkpoint: Checkpoint) -> Checkpoint:
    """The same model, as if it had no more than the layers that are compared."""
    config = deepcopy(checkpoint.config)
    kinds = layer_kinds(config)
    of_every_kind = 1 + max(kinds.index(kind) for kind in set(kinds))
    config.num_hidden_layers = min(len(kinds), max(COMPARED_LAYERS, of_every_kind))
    for name in ("layer_types", "no_rope_layers"):
        if by_layer := getattr(config, name, None):
            setattr(config, name, by_layer[: config.num_hidden_layers])
    return replace(checkpoint, config=config)


def _embedding_rows(folder: Path) -> int:
    for stored in stored_tensors(folder):
        if stored.name == EMBEDDING:
            return stored.shape[0]
    raise UnsupportedModelError(
        f"{folder} has no {EMBEDDING}, by which --tensor-parallel finds the embedding: leave it out"
    )
