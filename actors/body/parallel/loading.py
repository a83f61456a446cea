"""From a model folder to a body on several ranks.

No process holds the model, so that it cannot be compared with transformers' own forward pass as a
whole. Its first layers can: every layer is made in the same way of weights of the same names. What
was found is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from lexshard.actors.body.checkpoint import Checkpoint, read_checkpoint
from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.actors.body.fused import EMBEDDING, layer_kinds, plan_of, supports
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.head_weights import HeadWeights, check_head, narrowed, read_head
from lexshard.actors.body.loading import (
    ROUNDED,
    TOLERANCES,
    LoadedModel,
    checked_fused_body,
    dtype_of_weights,
    read_model,
)
from lexshard.actors.body.parallel.checks import check_folder_shared
from lexshard.actors.body.parallel.messages import RankPart
from lexshard.actors.body.parallel.parallel_body import NoOthers, OtherRanks, ParallelBody
from lexshard.actors.body.parallel.rank import BodyRank
from lexshard.actors.body.parallel.share import RankShare
from lexshard.actors.body.parallel.slices import StoredSlices
from lexshard.actors.body.proven import (
    ProvenModel,
    head_name_of,
    recall_proven,
    remember_proven,
)
from lexshard.actors.body.refusals import check_stored_types, model_class
from lexshard.actors.body.self_test import check_body, plain_forward, run_alone
from lexshard.actors.stored_tensors import stored_tensors
from lexshard.kernels.linear import Arithmetic

# Layers that are compared at least: one that follows on another, and one of every kind.
COMPARED_LAYERS = 2
_WAY = "parallel"  # as what a load is remembered

# Starts the processes of all ranks but the first.
StartRanks = Callable[[Sequence[RankPart]], OtherRanks]


def load_parallel(
    path: str | Path,
    dtype: Literal["auto", "float32", "bfloat16"],
    ranks: int,
    start: StartRanks | None,
) -> LoadedModel:
    """The model in a local folder, its body on ``ranks`` ranks, of which the first is here.

    Raises what `actors.body.loading.load` and ``start`` raise, and ValueError without a ``start``
    where there are others to start.
    """
    folder = Path(path).expanduser()
    check_folder_shared(folder, ranks)
    if ranks > 1 and start is None:
        raise ValueError("a parallel body needs processes for its other ranks: give start_ranks")
    proven = recall_proven(folder, dtype, _WAY) or _prove(folder, dtype)
    vocabulary = _embedding_rows(folder)
    parts = [
        RankPart(str(folder), proven.dtype, proven.plan, rank, ranks, vocabulary)
        for rank in range(ranks)
    ]
    others = NoOthers() if start is None or ranks == 1 else start(parts[1:])
    try:
        body = ParallelBody(proven.plan, parts[0].build(), others)
    except BaseException:
        others.close()
        raise
    body.batch_invariant = proven.batch_invariant
    output = StoredSlices(folder, getattr(torch, proven.dtype))(proven.head_name)
    if output is None:
        raise KeyError(proven.head_name)
    return LoadedModel(
        body=body,
        head=HeadWeights(narrowed(output), None, proven.softcap, proven.head_scale),
        dtype=proven.dtype,
        vocabulary_size=proven.vocabulary_size,
        eos_token_ids=proven.eos_token_ids,
        default_sampling=proven.default_sampling,
        max_positions=proven.plan.max_positions,
        parameters=proven.parameters,
    )


def _prove(folder: Path, dtype: str) -> ProvenModel:
    """Compares the first layers, in this process, and remembers what was found."""
    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    kind = model_class(config)
    check_stored_types(checkpoint.stored_dtypes)
    if not supports(config):
        raise UnsupportedModelError(
            f"this {config.model_type} has layers that --tensor-parallel does not share: leave it "
            "out"
        )
    place = torch.device("cpu")
    weights_dtype = dtype_of_weights(dtype, checkpoint.stored_dtypes, place)
    arithmetic: Arithmetic = "bfloat16" if weights_dtype == torch.bfloat16 else "float32"
    with _no_word_of_other_layers():
        model = read_model(kind, _first_layers(checkpoint), weights_dtype, place)
    head_name = head_name_of(model)
    if head_name is None:
        raise UnsupportedModelError(
            f"the output weights of this {config.model_type} have a bias or an unknown name, which "
            "--tensor-parallel does not read: leave it out"
        )
    head = read_head(model)
    expected = plain_forward(model)
    exact, tolerance = TOLERANCES[torch.float32], TOLERANCES[weights_dtype]
    for hidden, logits in zip(expected.hidden, expected.logits, strict=True):
        check_head(head, hidden, logits, exact)
    weights = model.state_dict().get
    checked_fused_body(model, weights, arithmetic, expected, exact, tolerance)
    plan = plan_of(model, arithmetic)
    rows = head.weight.shape[0]
    whole = RankShare(0, 1, plan.shape, model.get_input_embeddings().weight.shape[0])
    body = ParallelBody(plan, BodyRank(plan, whole, _slices_of(model)), NoOthers())
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
    found = ProvenModel(
        plan=plan_of(model, arithmetic, config),
        batch_invariant=invariant,
        head_name=head_name,
        head_scale=head.scale,
        softcap=head.softcap,
        dtype=str(weights_dtype).removeprefix("torch."),
        vocabulary_size=min(rows, checkpoint.tokenizer_size or rows),
        eos_token_ids=tuple(token for token in checkpoint.eos_token_ids if token < rows),
        default_sampling=checkpoint.default_sampling,
        parameters=checkpoint.parameters,
    )
    remember_proven(folder, found, model, dtype, _WAY)
    return found


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


@contextmanager
def _no_word_of_other_layers() -> Iterator[None]:
    """transformers warns of every weight of a folder that a model has no use for."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _slices_of(model: Any) -> Callable[[str, range | None, range | None], torch.Tensor | None]:
    """Rows and columns of the weights of a transformers model."""
    weights = model.state_dict()

    def part(name: str, rows: range | None, columns: range | None) -> torch.Tensor | None:
        found: torch.Tensor | None = weights.get(name)
        if found is None:
            return None
        if rows is not None:
            found = found[rows.start : rows.stop]
        return found if columns is None else found[:, columns.start : columns.stop]

    return part


def _embedding_rows(folder: Path) -> int:
    for stored in stored_tensors(folder):
        if stored.name == EMBEDDING:
            return stored.shape[0]
    raise UnsupportedModelError(
        f"{folder} has no {EMBEDDING}, by which --tensor-parallel finds the embedding: leave it out"
    )
