"""A load that passed its checks, remembered: the next one reads weights straight from their files.

To prove a fused body the loader makes the whole model with transformers and compares them, which
takes seconds, and minutes for half a billion weights. As long as files, software and machine are
the same the outcome is, so it is remembered with all that the body needs beside its weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.body.families import text_description
from lexshard.actors.body.fused import EMBEDDING, FusedBody, FusedPlan, supports
from lexshard.actors.body.head_weights import HeadWeights, narrowed
from lexshard.actors.body.parallel.slices import Slices, StoredSlices
from lexshard.actors.remembered import (
    files_fingerprint,
    fingerprint,
    recall,
    remember,
    software_and_machine,
)
from lexshard.kernels.linear import row_slices

OUTPUT_WEIGHT = "lm_head.weight"
_TRIED = "tried-"  # before the name of a load
_DESCRIBING = ("*.json", "*.safetensors", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class ProvenModel:
    """What a load found out: a `LoadedModel` without its weights."""

    plan: FusedPlan
    batch_invariant: bool
    head_name: str
    head_scale: float
    softcap: float | None
    dtype: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float | int]
    parameters: int


def recall_proven(folder: Path, *options: object) -> ProvenModel | None:
    """What loading ``folder`` with these options found out when all else was as it is now."""
    try:
        return recall(*_named(folder, options), ProvenModel)
    except OSError:  # a folder that cannot be read is refused with more words than that
        return None


def is_to_prove(folder: Path, *options: object) -> bool:
    """Whether loading ``folder`` would prove a fused body, as far as ``config.json`` tells, and has
    not been tried with these options since anything changed."""
    try:
        described = text_description(json.loads((folder / "config.json").read_bytes()))
        name, known = _named(folder, options)
        tried = recall(name, known, ProvenModel) or recall(_TRIED + name, known, bool)
        return tried is None and supports(SimpleNamespace(**described))
    except (OSError, ValueError, TypeError, AttributeError):
        return False  # the load knows what to make of it


def note_tried(folder: Path, *options: object) -> None:
    """Not every load that proves a body can be remembered: it need not be tried for that again."""
    name, known = _named(folder, options)
    remember(_TRIED + name, known, True)


def remember_proven(folder: Path, proven: ProvenModel, model: Any, *options: object) -> bool:
    """Keep ``proven``, if reading the folder's files gives the weights of ``model``, a transformers
    model that they were compared with: names may differ, and libraries convert what they read. The
    result is whether it does."""
    same = reads_the_same(folder, proven, model)
    if same:
        remember(*_named(folder, options), proven)
    return same


def reads_the_same(folder: Path, proven: ProvenModel, model: Any) -> bool:
    """Whether the folder's files give the weights of ``model``, and no more of a layer than it
    has: a bias that transformers leaves out would be added."""
    expected = model.state_dict()
    weights = StoredSlices(folder, getattr(torch, proven.dtype))
    optional = (".bias", "norm.weight")  # of which a body has what its first layer has
    first = {each for each in weights.names if each.startswith("model.layers.0.")}
    if {each for each in first if each.endswith(optional)} - set(expected):
        return False
    names = set(expected) - {OUTPUT_WEIGHT} | {proven.head_name}
    for name in names:
        found = weights(name)
        if found is None or found.shape != expected[name].shape:
            return False
        pairs = zip(row_slices(found), row_slices(expected[name]), strict=True)
        if not all(torch.equal(ours.float(), theirs.float().cpu()) for ours, theirs in pairs):
            return False
    return True


def read_proven(folder: Path, proven: ProvenModel) -> tuple[Body, HeadWeights]:
    """The body and the head that were proven. Raises WeightsError, KeyError, OSError or ValueError
    where files are not what they were."""
    weights = StoredSlices(folder, getattr(torch, proven.dtype))
    output = weights(proven.head_name)
    if output is None:
        raise KeyError(proven.head_name)
    head = HeadWeights(narrowed(output), None, proven.softcap, proven.head_scale)
    body = FusedBody.from_slices(proven.plan, tied(weights, head, proven.head_name))
    body.batch_invariant = proven.batch_invariant
    return body, head


def tied(slices: Slices, head: HeadWeights, head_name: str | None) -> Slices:
    """The weights that ``slices`` gives, but for an embedding that is the output head, too: that is
    the head's, and both are one in memory."""
    if head_name != EMBEDDING:
        return slices
    return lambda name, *part: head.weight if name == EMBEDDING else slices(name, *part)


def head_name_of(model: Any) -> str | None:
    """By which name a transformers model's output weights are stored; None where they are stored by
    no name that is known here, or have a bias."""
    output = model.get_output_embeddings()
    if getattr(output, "bias", None) is not None:
        return None
    if output.weight is model.get_input_embeddings().weight:
        return EMBEDDING
    return OUTPUT_WEIGHT if model.state_dict().get(OUTPUT_WEIGHT) is not None else None


def _named(folder: Path, options: tuple[object, ...]) -> tuple[str, str]:
    """Under which name, and with which fingerprint, a folder's load is remembered."""
    files = (path for pattern in _DESCRIBING for path in folder.glob(pattern))
    name = f"body-{fingerprint(folder.resolve(), *options)[:20]}"
    return name, fingerprint(files_fingerprint(files), software_and_machine(), *options)
