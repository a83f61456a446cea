"""Which files of a repository a server needs: never pickles, never what belongs to other tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lexshard.actors.stored_tensors import INDEX_FILE, ROUTER_FILE, SINGLE_FILE
from lexshard.cluster.models.names import ModelNameError

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# Beside the weights: what transformers reads of a tokenizer and of how a model likes to be asked.
DESCRIPTIONS = (
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    ROUTER_FILE,
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit. ``size`` in bytes and ``sha256`` are None where the Hub
    does not tell them."""

    name: str
    size: int | None = None
    sha256: str | None = None


Listing = Mapping[str, RemoteFile]


def check_listing(repository: str, listing: Listing) -> None:
    """Raises ModelNameError where the names alone tell that it cannot be served."""
    for name in (CONFIG, TOKENIZER):
        if name not in listing:
            raise ModelNameError(
                f"{repository} has no {name}, so it is no model that can be served: take one that "
                "is in the format of transformers"
            )
    if not {INDEX_FILE, SINGLE_FILE} & listing.keys():
        pickled = any(fnmatchcase(name, pattern) for name in listing for pattern in PICKLES)
        why = ", only pickles, which can run code and are not read" if pickled else ""
        raise ModelNameError(
            f"{repository} has no {SINGLE_FILE}{why}: take a repository or --revision that has one"
        )


def descriptions(listing: Listing) -> list[RemoteFile]:
    """What is fetched before the weights, but for ``config.json``, which comes first."""
    return [
        file
        for name, file in listing.items()
        if any(fnmatchcase(name, pattern) for pattern in DESCRIPTIONS)
    ]


def weights(repository: str, listing: Listing, folder: Path) -> list[RemoteFile]:
    """The files of the weights: one, which is what is read where there are parts beside it, too,
    or those that the index file in ``folder`` names.

    Raises:
        ModelNameError: the index names files that are not there, or none.
    """
    if SINGLE_FILE in listing:
        return [listing[SINGLE_FILE]]
    names = _indexed(repository, folder)
    missing = sorted(names - listing.keys())
    if missing:
        raise ModelNameError(
            f"{INDEX_FILE} of {repository} names {missing[0]}, which is not there: take another "
            "repository or --revision"
        )
    return [listing[name] for name in sorted(names)]


def is_whole(folder: Path) -> bool:
    """Whether ``folder`` has all that a server needs, by what it holds itself."""
    present = [CONFIG, TOKENIZER]
    if (folder / SINGLE_FILE).is_file() or not (folder / INDEX_FILE).is_file():
        present.append(SINGLE_FILE)
    else:
        try:
            present += _indexed(str(folder), folder)
        except ModelNameError:
            return False
    return has_all(folder, present)


def has_all(folder: Path, names: Collection[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _indexed(repository: str, folder: Path) -> set[str]:
    try:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        names = set(index["weight_map"].values())
        good = all(name.endswith(".safetensors") for name in names)
    except (ValueError, KeyError, AttributeError, TypeError):
        names, good = set(), False
    if not names or not good:
        raise ModelNameError(
            f"{INDEX_FILE} of {repository} lists no safetensors files: take another repository or "
            "--revision"
        )
    return names
