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

import numpy as np
import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.body.fused import EMBEDDING, FusedBody, FusedPlan, Tensors, supports
from lexshard.actors.body.head_weights import HeadWeights, narrowed
from lexshard.actors.remembered import (
    files_fingerprint,
    fingerprint,
    recall,
    remember,
    software_and_machine,
)
from lexshard.actors.stored_tensors import StoredTensor, stored_tensors
from lexshard.kernels.linear import row_slices

OUTPUT_WEIGHT = "lm_head.weight"
_TRIED = "tried-"  # before the name of a load
_DESCRIBING = ("*.json", "*.safetensors", "tokenizer.model")
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


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


class StoredWeights:
    """A model folder's weights as they are computed with: rounded to ``dtype``, read when asked."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
        self._dtype = dtype

    def __call__(self, name: str) -> torch.Tensor | None:
        """None where there is none of that name."""
        stored = self._tensors.get(name)
        return None if stored is None else _read(stored).to(self._dtype)

    def of_first_layer(self) -> set[str]:
        """Names of what a body may have or not, biases and norms: the first layer decides."""
        return {
            name
            for name in self._tensors
            if name.startswith("model.layers.0.") and name.endswith((".bias", "norm.weight"))
        }


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
        description = SimpleNamespace(**json.loads((folder / "config.json").read_bytes()))
        name, known = _named(folder, options)
        tried = recall(name, known, ProvenModel) or recall(_TRIED + name, known, bool)
        return tried is None and supports(description)
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
    weights = StoredWeights(folder, getattr(torch, proven.dtype))
    if weights.of_first_layer() - set(expected):
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
    """The body and the head that were proven. Raises WeightsError, KeyError or OSError where files
    are not what they were."""
    weights = StoredWeights(folder, getattr(torch, proven.dtype))
    output = weights(proven.head_name)
    if output is None:
        raise KeyError(proven.head_name)
    head = HeadWeights(narrowed(output), None, proven.softcap, proven.head_scale)
    body = FusedBody.from_tensors(proven.plan, tied(weights, head, proven.head_name))
    body.batch_invariant = proven.batch_invariant
    return body, head


def tied(tensor: Tensors, head: HeadWeights, head_name: str | None) -> Tensors:
    """The weights that ``tensor`` gives, but for an embedding that is the output head, too: that is
    the head's, and both are one in memory."""
    return lambda name: head.weight if name == head_name == EMBEDDING else tensor(name)


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


def _read(stored: StoredTensor) -> torch.Tensor:
    count = stored.stop - stored.start
    found = np.fromfile(stored.file, dtype=np.uint8, count=count, offset=stored.start)
    if len(found) != count:
        raise OSError(f"{stored.file} ends before {stored.name}")
    return torch.from_numpy(found).view(_TYPES[stored.dtype]).view(stored.shape)
