"""Traces of real services: how long prompts and answers were, when they came, what they shared."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SAMPLE_FOLDER = Path(__file__).parent / "data" / "traces"
SAMPLES = {  # what is shipped; data/traces/README.md has origins and licences
    "azure-conversation": "azure_conversation.csv",
    "azure-code": "azure_code.csv",
    "mooncake-conversation": "mooncake_conversation.jsonl",
}
BLOCK_TOKENS = 512  # of a hash id in Mooncake's traces

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_VIDUR = ("num_prefill_tokens", "num_decode_tokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(ValueError):
    """A file is no trace; says where and what was expected."""


class TracedRequest(NamedTuple):
    """A request: seconds after the first one, lengths in tokens, and of which blocks of
    ``BLOCK_TOKENS`` its prompt is made, where the trace tells."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; ``timed`` says whether their times are known."""

    name: str
    requests: tuple[TracedRequest, ...]
    timed: bool


def load_trace(name: str) -> Trace:
    """A shipped sample by its name, or a file: Azure's CSV, Vidur's CSV of lengths, or Mooncake's
    JSON lines, gzipped or not.

    Raises:
        TraceError: there is no such file, or a line of it is not what its format says.
    """
    path = SAMPLE_FOLDER / SAMPLES[name] if name in SAMPLES else Path(name)
    lines = _lines(path, name)
    if not lines:
        raise TraceError(f"{name}: the file is empty")
    timed = True
    if lines[0].lstrip().startswith("{"):
        requests = tuple(_mooncake(name, lines))
    else:
        header = tuple(next(csv.reader(lines[:1])))
        if header == _AZURE:
            requests = tuple(_azure(name, lines))
        elif header[: len(_VIDUR)] == _VIDUR:
            requests, timed = tuple(_vidur(name, lines)), False
        else:
            raise TraceError(
                f"{name}, line 1: not a trace. Known are CSV with the header "
                f"{','.join(_AZURE)} or {','.join(_VIDUR)},... and JSON lines with "
                f"{', '.join(_MOONCAKE)}"
            )
    if not requests:
        raise TraceError(f"{name}: a header and no request")
    for number, (before, after) in enumerate(pairwise(requests), start=2):
        if after.seconds < before.seconds:
            raise TraceError(f"{name}, request {number}: comes before the one in front of it")
    return Trace(name, requests, timed)


def _lines(path: Path, name: str) -> list[str]:
    try:
        content = path.read_bytes()
    except OSError as error:
        known = ", ".join(SAMPLES)
        raise TraceError(f"{name}: {error.strerror}; give a file or one of {known}") from None
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        return content.decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{name}: not a text file ({error})") from None


def _rows(
    name: str, lines: Sequence[str], columns: Sequence[str], more: bool
) -> Iterator[tuple[str, list[str]]]:
    """Where each row of a CSV file is, and the row, which may have ``more`` columns; no header."""
    for number, row in enumerate(csv.reader(lines[1:]), start=2):
        where = f"{name}, line {number}"
        if len(row) < len(columns) or (len(row) > len(columns) and not more):
            expected = ",".join(columns) + (",..." if more else "")
            raise TraceError(f"{where}: {len(row)} columns, expected {expected}")
        yield where, row


def _azure(name: str, lines: Sequence[str]) -> Iterator[TracedRequest]:
    first: datetime | None = None
    for where, row in _rows(name, lines, _AZURE, more=False):
        try:
            moment = datetime.fromisoformat(row[0])
        except ValueError:
            raise TraceError(
                f"{where}: {row[0]!r} is no time like 2023-11-16 18:17:03.97"
            ) from None
        first = first or moment
        prompt, output = (_tokens(where, *pair) for pair in zip(_AZURE[1:], row[1:], strict=True))
        yield TracedRequest((moment - first).total_seconds(), prompt, output)


def _vidur(name: str, lines: Sequence[str]) -> Iterator[TracedRequest]:
    for where, row in _rows(name, lines, _VIDUR, more=True):
        prompt, output = (_tokens(where, *pair) for pair in zip(_VIDUR, row, strict=False))
        yield TracedRequest(0.0, prompt, output)


def _mooncake(name: str, lines: Sequence[str]) -> Iterator[TracedRequest]:
    first: float | None = None
    for number, line in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        try:
            fields = json.loads(line)
            moment, prompt, output, blocks = (fields[key] for key in _MOONCAKE)
        except json.JSONDecodeError as error:
            raise TraceError(f"{where}: no JSON ({error})") from None
        except (KeyError, TypeError):
            raise TraceError(f"{where}: expected an object with {', '.join(_MOONCAKE)}") from None
        if not isinstance(moment, int | float) or isinstance(moment, bool):
            raise TraceError(f"{where}: timestamp {moment!r} is no number of milliseconds")
        prompt = _tokens(where, "input_length", prompt)
        wanted = math.ceil(prompt / BLOCK_TOKENS)
        if not isinstance(blocks, list) or not all(type(each) is int for each in blocks):
            raise TraceError(f"{where}: hash_ids are no list of whole numbers")
        if len(blocks) != wanted:
            raise TraceError(
                f"{where}: {len(blocks)} hash_ids for {prompt} tokens, expected {wanted} "
                f"(one for every {BLOCK_TOKENS})"
            )
        first = moment if first is None else first
        output = _tokens(where, "output_length", output)
        yield TracedRequest((moment - first) / 1000, prompt, output, tuple(blocks))


def _tokens(where: str, name: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if type(number) is not int or number < 1:
        raise TraceError(f"{where}: {name} {value!r} is no positive whole number")
    return number
