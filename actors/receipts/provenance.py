"""What made a reply: weights, tokenizer and arithmetic, by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from lexshard.actors.receipts.document import Arithmetic, Provenance
from lexshard.actors.remembered import files_fingerprint, fingerprint, recall, remember
from lexshard.actors.stored_tensors import stored_tensors

# Counts what changes a logit's bits: another order of sums, another rounding.
ARITHMETIC_VERSION = 1
_READ_AT_ONCE = 1 << 22  # bytes
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def provenance(folder: Path, dtype: str, body: str, processor: str) -> Provenance:
    """That of a model in ``folder`` as an engine computes it. Takes a second for each gigabyte of
    weights once; afterwards it is remembered while no file changes.

    Raises OSError or WeightsError where files are missing.
    """
    model, tokenizer = _hashes(folder)
    name: Literal["float32", "bfloat16"] = "bfloat16" if dtype == "bfloat16" else "float32"
    return Provenance(model, tokenizer, Arithmetic(ARITHMETIC_VERSION, name, body, processor))


def _hashes(folder: Path) -> tuple[str, str]:
    weights = {tensor.file for tensor in stored_tensors(folder)}
    model = [folder / "config.json", *sorted(weights)]
    tokenizer = [path for name in _TOKENIZER_FILES if (path := folder / name).is_file()]
    name = f"hashes-{fingerprint(folder.resolve())[:16]}"
    mark = files_fingerprint([*model, *tokenizer])
    known = recall(name, mark, list[str])
    if known is None:
        known = [hash_of(model), hash_of(tokenizer)]
        remember(name, mark, known)
    return known[0], known[1]


def hash_of(paths: Iterable[Path]) -> str:
    """SHA-256 of the names and contents of files."""
    whole = hashlib.sha256()
    for path in paths:
        own = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_READ_AT_ONCE):
                own.update(block)
        whole.update(f"{path.name}\0{own.hexdigest()}\n".encode())
    return whole.hexdigest()
