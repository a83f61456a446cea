"""From a corpus to the tokenizer and the weighted token sources."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from models.recipes.demo.recipe import DemoRecipe, Mixture
from models.recipes.demo.texts.chat import dialogue_text, story_chats
from models.recipes.demo.texts.corpus import Corpus
from models.recipes.demo.texts.tokenizer import END_OF_TEXT, train_tokenizer
from models.recipes.demo.texts.windows import TokenSource

_PASSAGE_CHARACTERS = 4_000


@dataclass(frozen=True)
class TextSource:
    """Documents of one kind of text and their share of the training windows."""

    name: str
    weight: float
    documents: list[str]
    paragraph_starts: bool


def text_sources(corpus: Corpus, mixture: Mixture, seed: int) -> list[TextSource]:
    """The weighted kinds of training text that the corpus allows."""
    generator = random.Random(seed)
    weights = {"children": mixture.children, "novels": mixture.novels}
    sources = [
        TextSource(
            name,
            weights.get(name, mixture.children + mixture.novels),
            ["\n\n".join(book) for book in books],
            True,
        )
        for name, books in corpus.prose.items()
        if books
    ]
    if corpus.dialogues:
        dialogues = list(corpus.dialogues)
        generator.shuffle(dialogues)
        texts = [
            dialogue_text(dialogue, generator, mixture.system_prompt_share)
            for dialogue in dialogues
        ]
        sources.append(TextSource("dialogues", mixture.dialogues, texts, False))
    books = corpus.prose.get("children") or next(iter(corpus.prose.values()), [])
    chats = story_chats(books, mixture.story_chat_records, generator, mixture.system_prompt_share)
    if chats:
        sources.append(TextSource("story_chat", mixture.story_chat, chats, False))
    return sources


def tokenizer_from(sources: list[TextSource], recipe: DemoRecipe, seed: int) -> Tokenizer:
    """Train the tokenizer on a sample that follows the mixture."""
    generator = random.Random(seed)
    total = sum(source.weight for source in sources)
    sample: list[str] = []
    for source in sources:
        room = recipe.tokenizer_sample_bytes * source.weight / total
        pieces = [
            document[begin : begin + _PASSAGE_CHARACTERS]
            for document in source.documents
            for begin in range(0, len(document), _PASSAGE_CHARACTERS)
        ]
        generator.shuffle(pieces)
        for piece in pieces:
            if room <= 0:
                break
            sample.append(piece)
            room -= len(piece)
    return train_tokenizer(sample, recipe.target.vocabulary)


def _tokenise(source: TextSource, tokenizer: Tokenizer) -> TokenSource:
    end = tokenizer.token_to_id(END_OF_TEXT)
    gap = tokenizer.encode("\n\n").ids
    parts: list[np.ndarray] = []
    for begin in range(0, len(source.documents), 64):
        batch = source.documents[begin : begin + 64]
        for encoding in tokenizer.encode_batch_fast(batch):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    tokens = np.concatenate(parts)
    if source.paragraph_starts:
        match = np.ones(len(tokens) - len(gap), dtype=bool)
        for offset, value in enumerate(gap):
            match &= tokens[offset : len(tokens) - len(gap) + offset] == value
        starts = np.union1d(starts, np.flatnonzero(match) + len(gap))
    return TokenSource(source.name, source.weight, tokens, starts)


def token_sources(sources: list[TextSource], tokenizer: Tokenizer) -> list[TokenSource]:
    """Tokenise every source."""
    return [_tokenise(source, tokenizer) for source in sources]


def frequent_first(sources: list[TokenSource], vocabulary: int) -> np.ndarray:
    """All token ids, the most frequent of the mixture first."""
    frequency = np.zeros(vocabulary)
    for source in sources:
        counts = np.bincount(source.tokens, minlength=vocabulary)
        frequency += source.weight * counts / counts.sum()
    return np.argsort(-frequency, kind="stable")
