"""Reading and cleaning the raw training texts."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from models.recipes.demo.recipe import Mixture

DOCUMENT_SEPARATOR = "<|endoftext|>"

_CHARACTERS = str.maketrans(
    {
        "“": '"',
        "”": '"',
        "‘": "'",
        "’": "'",
        "—": "--",
        "–": "-",
        "_": "",
        "\u00a0": " ",
        "\ufeff": "",
    }
)
_HEADING = re.compile(
    r"^(chapter|book|part|section|letter|volume|contents|illustration|note|the end|finis|scene"
    r"|act)\b",
    re.IGNORECASE,
)
_PARAGRAPH_END = re.compile(r"[.!?,;:\-\"')]$")
_PARAGRAPH_START = re.compile(r"^[\"'(]*[A-Z]")
_SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+(?=[\"'A-Z])|(?<=[.!?][\"'])\s+(?=[\"'A-Z])")
_OPENING_LENGTH = 200
_HEADING_LENGTH = 80
_SHORTEST_PARAGRAPH = 8


@dataclass(frozen=True)
class Dialogue:
    """One dialogue: alternating ``(speaker, text)`` turns, speakers ``U`` and ``S``."""

    identity: str
    turns: tuple[tuple[str, str], ...]


@dataclass
class Corpus:
    """Cleaned texts, divided into training and held-out parts.

    Prose is a list of books for each source name; a book is a list of paragraphs.
    """

    prose: dict[str, list[list[str]]] = field(default_factory=dict)
    held_out_prose: dict[str, list[list[str]]] = field(default_factory=dict)
    dialogues: list[Dialogue] = field(default_factory=list)
    held_out_dialogues: list[Dialogue] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def split_sentences(paragraph: str) -> list[str]:
    """Sentences of a paragraph, by a rule good enough for prose."""
    return _SENTENCE_BREAK.split(paragraph)


def clean_book(text: str) -> list[str]:
    """Prose paragraphs of a book without front matter, headings and verse."""
    kept: list[str] = []
    for raw in text.translate(_CHARACTERS).split("\n\n"):
        paragraph = raw.strip()
        if _is_prose(paragraph) and (kept or len(paragraph) >= _OPENING_LENGTH):
            kept.append(paragraph)
    return kept


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < _SHORTEST_PARAGRAPH or "\n" in paragraph:
        return False
    if not _PARAGRAPH_END.search(paragraph) or not _PARAGRAPH_START.search(paragraph):
        return False
    if len(paragraph) < _HEADING_LENGTH and _HEADING.search(paragraph):
        return False
    letters = [character for character in paragraph if character.isalpha()]
    capitals = sum(character.isupper() for character in letters)
    return bool(letters) and capitals < 0.3 * len(letters)


def read_text(path: Path) -> str:
    """Text of a plain or xz-compressed file."""
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            return stream.read()
    return path.read_text(encoding="utf-8")


def _dialogues_of(path: Path) -> Iterator[Dialogue]:
    for line in read_text(path).splitlines():
        if not line.strip():
            continue
        record = json.loads(line)
        turns = tuple((str(speaker), str(text).strip()) for speaker, text in record["turns"])
        yield Dialogue(str(record["id"]), turns)


def _source_name(path: Path) -> str | None:
    for name in ("children", "novels"):
        if name in path.name:
            return name
    return None


def _prose_paths(folder: Path) -> dict[str, list[Path]]:
    paths = sorted([*folder.glob("*.txt"), *folder.glob("*.txt.xz")])
    named: dict[str, list[Path]] = {}
    for path in paths:
        name = _source_name(path)
        if name is not None:
            named.setdefault(name, []).append(path)
    return named or ({"prose": paths} if paths else {})


def load_corpus(folder: Path, mixture: Mixture) -> Corpus:
    """Read a folder of texts and set the held-out parts aside."""
    corpus = Corpus()
    for name, paths in _prose_paths(folder).items():
        training: list[list[str]] = []
        held_out: list[list[str]] = []
        for path in paths:
            documents = read_text(path).split(f"\n{DOCUMENT_SEPARATOR}\n")
            books = [book for book in map(clean_book, documents) if book]
            count = min(mixture.held_out_books, len(books) // 2)
            training += books[: len(books) - count]
            held_out += books[len(books) - count :]
            corpus.files.append(path.name)
        corpus.prose[name] = training
        corpus.held_out_prose[name] = held_out
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.xz")]):
        for dialogue in _dialogues_of(path):
            held = dialogue.identity.startswith(mixture.held_out_dialogue_prefix)
            (corpus.held_out_dialogues if held else corpus.dialogues).append(dialogue)
        corpus.files.append(path.name)
    if not corpus.prose and not corpus.dialogues:
        raise FileNotFoundError(f"no .txt, .txt.xz, .jsonl or .jsonl.xz files in {folder}")
    return corpus
