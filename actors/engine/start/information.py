"""What an engine tells of itself: what it has loaded, decided and measured."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from lexshard.actors.body.errors import ModelRefusedError
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import NGRAM, EngineConfiguration, EngineInformation
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.engine.start.accelerator import describe_device, processor_of
from lexshard.actors.engine.threads.choice import EngineThreads
from lexshard.actors.head.build import BuiltHead
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import BY_DISTRIBUTION
from lexshard.actors.stored_tensors import stored_tensors

_OTHERS = ("*config.json", "*token*", "vocab.json", "merges.txt")  # than weights
_PIECE, _PIECES = 4096, 16  # bytes, and how many pieces of a file of weights


def describe_engine(
    configuration: EngineConfiguration,
    model: LoadedModel,
    built: BuiltHead,
    threads: EngineThreads,
    drafter: Drafter | None,
    *,
    files: str,
    max_model_len: int,
    blocks: int,
) -> EngineInformation:
    """Of an engine whose KV cache has ``blocks``, from what it is made of."""
    known = describe_model(model, configuration.model, built.description, blocks)
    return replace(
        known,
        accelerator=describe_device(model.body),
        processor=processor_of(model.body),
        files=files,
        head_bytes=model.head.weight.nbytes,
        threads=threads.most,
        max_model_len=max_model_len,
        decisions=_where_decided(configuration),
        drafts="none" if drafter is None else _who_drafts(configuration, drafter),
        head_timings=tuple((t.kind, t.rows, t.screen, t.milliseconds) for t in built.timings),
        thread_choices=threads.choices,
        thread_timings=tuple((t.rows, t.threads, t.milliseconds) for t in threads.timings),
    )


def describe_model(model: LoadedModel, folder: str, head: str, blocks: int) -> EngineInformation:
    """Of a model by itself, from ``folder``, whose KV cache has ``blocks``, with a ``head``."""
    return EngineInformation(
        model=folder,
        dtype=model.dtype,
        device=str(model.body.device),
        body=model.body.name,
        head=head,
        batch_invariant=model.body.batch_invariant,
        threads=1,
        max_model_len=model.max_positions,
        vocabulary_size=model.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=dict(model.default_sampling),
        kv_blocks=blocks,
        kv_tokens=blocks * BLOCK_TOKENS,
        kv_bytes=blocks * model.body.kv_bytes_per_block(),
        parameters=model.parameters,
        process_id=os.getpid(),
    )


def files_of(configuration: EngineConfiguration) -> str:
    """A name for the files that tokens follow from, the same for copies of them on other nodes: by
    their sizes, and of weights by pieces, for to read all takes as long as to load them. Empty
    where they cannot be read: loading them says why."""
    models = [configuration.model]
    if configuration.verify in BY_DISTRIBUTION and configuration.draft not in (None, NGRAM):
        models.append(str(configuration.draft))
    digest = hashlib.blake2b(digest_size=10)
    try:
        for folder in (Path(model).expanduser() for model in models):
            weights = {tensor.file for tensor in stored_tensors(folder)}
            others = [path for each in _OTHERS for path in folder.glob(each)]
            for path in sorted(weights.union(others)):
                size = path.stat().st_size
                digest.update(f"{path.name} {size}".encode())
                with path.open("rb") as file:
                    apart = size // _PIECES if path in weights else 0
                    for start in range(0, size, max(_PIECE, apart)):
                        file.seek(start)
                        digest.update(file.read(_PIECE))
    except (OSError, ModelRefusedError):
        return ""
    return digest.hexdigest()


def _who_drafts(configuration: EngineConfiguration, drafter: Drafter) -> str:
    least = configuration.draft_tokens if configuration.draft_length == "fixed" else 0
    count = f"{least} to {configuration.draft_tokens}" if not least else str(least)
    return f"{drafter.name}, {count} tokens ahead, {configuration.verify} verification"


def _where_decided(configuration: EngineConfiguration) -> str:
    count, threads = configuration.samplers, configuration.sampler_threads
    each = f", {threads} threads each" if threads > 1 else ""
    if not count:
        return f"in the engine's thread{each}"
    place = {"processes": "processes", "ray": "Ray actors"}
    beside = f"beside the forward pass by {count} sampler{'s' if count > 1 else ''}"
    return f"{beside} in {place[configuration.sampler_placement]}{each}"
