"""Corpus, tokenizer and token sources, kept between runs."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.recipes.demo.recipe import DemoRecipe
from models.recipes.demo.texts.corpus import Corpus
from models.recipes.demo.texts.sources import (
    TextSource,
    frequent_first,
    text_sources,
    token_sources,
    tokenizer_from,
)
from models.recipes.demo.texts.windows import TokenSource


@dataclass(frozen=True)
class Prepared:
    """Everything training needs besides the recipe; ``digest`` names tokenizer and texts."""

    tokenizer: Tokenizer
    sources: list[TokenSource]
    frequent_first: np.ndarray
    digest: str


def prepare(corpus: Corpus, state: Path, work: Path, recipe: DemoRecipe, seed: int) -> Prepared:
    """Tokenise the corpus, or load the tokens that an earlier call left in ``work``.

    The tokenizer in ``state`` is taken where there is one, be it from another demo.
    """
    texts = text_sources(corpus, recipe.mixture, seed)
    tokenizer_path = state / "tokenizer.json"
    if tokenizer_path.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    else:
        tokenizer = tokenizer_from(texts, recipe, seed)
        tokenizer.save(str(tokenizer_path))
    digest = _digest(texts, tokenizer)
    tokens_path = work / f"tokens-{digest}.npz"
    if tokens_path.exists():
        sources = _load(tokens_path)
    else:
        sources = token_sources(texts, tokenizer)
        _save(sources, tokens_path)
    order = frequent_first(sources, recipe.target.vocabulary)
    return Prepared(tokenizer, sources, order, digest)


def _digest(texts: list[TextSource], tokenizer: Tokenizer) -> str:
    read = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        read.update(f"{text.name} {text.weight}".encode())
        for document in text.documents:
            read.update(document.encode() + b"\0")
    return read.hexdigest()[:12]


def _save(sources: list[TokenSource], path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "names": np.asarray([source.name for source in sources]),
        "weights": np.asarray([source.weight for source in sources]),
    }
    for number, source in enumerate(sources):
        arrays[f"tokens{number}"] = source.tokens
        arrays[f"starts{number}"] = source.starts
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    os.replace(partial, path)


def _load(path: Path) -> list[TokenSource]:
    with np.load(path) as stored:
        return [
            TokenSource(
                str(name), float(weight), stored[f"tokens{number}"], stored[f"starts{number}"]
            )
            for number, (name, weight) in enumerate(
                zip(stored["names"], stored["weights"], strict=True)
            )
        ]
