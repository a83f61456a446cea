"""Corpus, tokenizer and token sources, kept in the work directory between runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.recipes.demo.recipe import DemoRecipe
from models.recipes.demo.texts.corpus import load_corpus
from models.recipes.demo.texts.sources import (
    frequent_first,
    text_sources,
    token_sources,
    tokenizer_from,
)
from models.recipes.demo.texts.windows import TokenSource


@dataclass(frozen=True)
class Prepared:
    """Everything training needs besides the recipe."""

    tokenizer: Tokenizer
    sources: list[TokenSource]
    frequent_first: np.ndarray


def prepare(data: Path, work: Path, recipe: DemoRecipe, seed: int) -> Prepared:
    """Read, clean and tokenise the data, or load what an earlier run left in ``work``."""
    tokens_path = work / f"tokens-{seed}.npz"
    tokenizer_path = work / f"tokenizer-{seed}.json"
    if tokens_path.exists() and tokenizer_path.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        sources = _load(tokens_path)
    else:
        texts = text_sources(load_corpus(data, recipe.mixture), recipe.mixture, seed)
        tokenizer = tokenizer_from(texts, recipe, seed)
        tokenizer.save(str(tokenizer_path))
        sources = token_sources(texts, tokenizer)
        _save(sources, tokens_path)
    order = frequent_first(sources, recipe.target.vocabulary)
    return Prepared(tokenizer, sources, order)


def _save(sources: list[TokenSource], path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "names": np.asarray([source.name for source in sources]),
        "weights": np.asarray([source.weight for source in sources]),
    }
    for number, source in enumerate(sources):
        arrays[f"tokens{number}"] = source.tokens
        arrays[f"starts{number}"] = source.starts
    np.savez(path, allow_pickle=False, **arrays)


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
