"""A digest of what bodies, screens, heads and draws give on the processor that is compiled for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from lexshard.actors.body.loading import LoadedModel, load
from lexshard.actors.body.self_test import pack_batch
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.cluster.samplers.start import start_sampler
from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.kernels.quantize import quantize
from lexshard.kernels.screen import screen
from lexshard.loadtest import token_digest
from tests.support.paths import DEMO, DEMO_DRAFT

# Row counts that fill every register tile and leave every remainder, of both heights.
COUNTS = (*range(1, 18), 47, 48, 97)
REQUESTS = 20  # two of each kind, one with three choices
# Heads and drafters, so that every screen decides with guesses and without.
ENGINES: dict[str, dict[str, Any]] = {
    "dense": {"head": "dense"},
    "int8": {"head": "certified", "tiers": ("int8",), "draft": "ngram"},
    "int4": {"head": "certified", "tiers": ("int4",), "draft": str(DEMO_DRAFT)},
    "exact": {"head": "certified", "draft": str(DEMO_DRAFT), "verify": "same-distribution"},
}


def sha256(arrays: Iterable[Any]) -> str:
    whole = hashlib.sha256()
    for array in arrays:
        whole.update(np.ascontiguousarray(array).tobytes())
    return whole.hexdigest()


def hidden_states(model: LoadedModel) -> Iterator[torch.Tensor]:
    """[count, d] of a whole sequence for each of ``COUNTS``, and of its last token alone."""
    body, longest = model.body, max(COUNTS)
    table = [list(range(-(-longest // BLOCK_SIZE)))]
    tokens = [[(31 * place + 7) % model.vocabulary_size for place in range(longest)]]
    body.allocate_cache(len(table[0]))
    for count in COUNTS:
        yield body.forward(pack_batch(tokens, [(0, 0, count)], table)).clone()
        yield body.forward(pack_batch(tokens, [(0, count - 1, count)], table)).clone()


def screened(model: LoadedModel, hidden: torch.Tensor) -> Iterator[Any]:
    """Estimates and bounds of ``hidden`` by every tier and width of hidden states."""
    weight = model.head.weight
    for kind in ("int8", "int4"):
        tier = quantize(weight, kind)
        for bits in (16, 8) if kind == "int8" else (16,):
            for count in COUNTS:
                yield from screen(hidden[:count], tier, hidden_bits=bits)


def engine_digest(folder: Path, name: str) -> str:
    """Of all that clients are told: tokens, log-probabilities, reasons to end."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    settings = {"draft_length": "fixed", "index": str(folder / f"{name}.lexshard"), **ENGINES[name]}
    configuration = EngineConfiguration(
        str(DEMO), dtype="float32", device="cpu", threads=1, max_model_len=256, **settings
    )
    engine = Engine(configuration, start_sampler)
    try:
        requests = token_digest.seeded_requests(tokenizer, REQUESTS, seed=1)
        return token_digest.digest(run_to_completion(engine, requests))
    finally:
        engine.close()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every bit of each part. ``folder`` is made, for the indexes."""
    folder.mkdir()
    torch.set_num_threads(1)
    model = load(DEMO, "float32", body="fused", device="cpu")
    hidden = list(hidden_states(model))
    parts = {"body": sha256(hidden), "screens": sha256(screened(model, hidden[-2]))}
    return parts | {name: engine_digest(folder, name) for name in ENGINES}
