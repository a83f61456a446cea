"""Traces: what a model is asked and answers, read from files as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = ("token_ids", "messages", "prompt", "text")


@dataclass(frozen=True, slots=True)
class Traces:
    """Token ids of every text, and where they come from."""

    sources: tuple[str, ...]
    texts: tuple[tuple[int, ...], ...]


def read_traces(files: Sequence[Path], tokenizer: Any | None, vocabulary_size: int) -> Traces:
    """Every text of ``files``: JSON lines with one of ``FIELDS``, or plain text by paragraphs.

    A ``.jsonl`` file has an object a line: ``token_ids`` (numbers), ``messages`` (of a chat),
    ``prompt`` or ``text``; a ``prompt`` may be numbers as well. Paragraphs are divided by blank
    lines. Raises ValueError, naming file and line, for what cannot be read or does not fit.
    """
    texts: list[tuple[int, ...]] = []
    for path in files:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            # JSON may hold what else ends lines for Python, as U+2028.
            for number, line in enumerate(content.split("\n"), 1):
                if line.strip():
                    texts.append(_record(line, f"{path}, line {number}", tokenizer))
        else:
            for paragraph in content.split("\n\n"):
                if paragraph.strip():
                    texts.append(_encoded(paragraph.strip(), str(path), tokenizer))
    texts = [ids for ids in texts if ids]
    if not texts:
        raise ValueError(f"no text in {', '.join(map(str, files))}")
    most = max(max(ids) for ids in texts)
    if most >= vocabulary_size or min(min(ids) for ids in texts) < 0:
        raise ValueError(
            f"token ids of the traces are not all below {vocabulary_size:,}: they are for "
            "another model"
        )
    return Traces(tuple(path.name for path in files), tuple(texts))


def _record(line: str, where: str, tokenizer: Any | None) -> tuple[int, ...]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    field = next((f for f in FIELDS if isinstance(record, dict) and record.get(f)), None)
    if field is None:
        raise ValueError(f"{where} has none of {', '.join(FIELDS)}")
    value = record[field]
    if field == "messages":
        return _conversation(value, where, tokenizer)
    if isinstance(value, str):
        return _encoded(value, where, tokenizer)
    if isinstance(value, list) and all(isinstance(i, int) for i in value):
        return tuple(value)
    raise ValueError(f"{where}: {field} is neither text nor token ids")


def _conversation(messages: Any, where: str, tokenizer: Any | None) -> tuple[int, ...]:
    if not isinstance(messages, list) or not all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError(f"{where}: messages need a role and a text content each")
    if tokenizer is not None and tokenizer.chat_template:
        asked = messages[-1]["role"] == "user"
        text = str(  # with the special tokens, BOS among them
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
        )
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)
    return _encoded("\n\n".join(message["content"] for message in messages), where, tokenizer)


def _encoded(text: str, where: str, tokenizer: Any | None) -> tuple[int, ...]:
    if tokenizer is None:
        raise ValueError(f"{where} is text and the model has no tokenizer: give token_ids")
    return tuple(tokenizer(text).input_ids)
