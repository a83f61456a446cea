"""Names for a model's files, by what is in them.

``python -m lexshard.actors.receipts.hashes DIR`` prints both, for processes that do without what
computes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from lexshard.actors.remembered import files_fingerprint, fingerprint, recall, remember
from lexshard.actors.stored_tensors import stored_tensors

_READ_AT_ONCE = 1 << 22  # bytes
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def model_hashes(folder: Path) -> tuple[str, str]:
    """SHA-256 of weights and configuration, and of the tokenizer, of the model in ``folder``. Takes
    a second or two for each gigabyte once, and is remembered while no file changes.

    Raises OSError or WeightsError where files are missing.
    """
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


if __name__ == "__main__":
    print(*model_hashes(Path(sys.argv[1])))
