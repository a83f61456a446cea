"""Receipts in files: by themselves, in replies and lists of these, on lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from lexshard.actors.receipts.document import Receipt, ReceiptError, read_receipt

SUFFIXES = (".json", ".jsonl")
NONE_HERE = "there is no receipt in it"


@dataclass(frozen=True, slots=True)
class FoundReceipt:
    """What stands at a ``place``: a receipt, or what should have been one or have had one, with
    the reason why there is none. ``beside`` is the choice that brought it, which is ``whole``
    where it cannot be the last piece of a stream."""

    place: str
    receipt: Receipt | None
    refusal: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    @property
    def has_its_end(self) -> bool:
        """Whether the choice ends as its receipt does, if it says how: by calls of tools is a
        stop."""
        told: object = self.beside.get("finish_reason")
        own = None if self.receipt is None else self.receipt.finish_reason
        return told is None or ("stop" if told == "tool_calls" else told) == own


def found_in(path: Path) -> Iterator[FoundReceipt]:
    """All that ``path``, a file or a folder of files, holds: at least one, if only a refusal."""
    if not path.is_dir():
        return iter(_in_file(path))
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    nothing = FoundReceipt(str(path), None, f"no {' or '.join(SUFFIXES)} is in it")
    return chain.from_iterable(map(_in_file, files)) if files else iter((nothing,))


def _in_file(path: Path) -> list[FoundReceipt]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        return [FoundReceipt(str(path), None, str(error))]
    parts = [(str(path), text)]
    if path.suffix == ".jsonl":  # U+2028, which splits lines elsewhere, may stand in JSON's texts
        lines = enumerate(text.split("\n"), 1)
        parts = [(f"{path}:{number}", line) for number, line in lines if line.strip()]
    found: list[FoundReceipt] = []
    pieces: dict[str, FoundReceipt] = {}  # of streams, whose receipts are to come
    for place, part in parts:
        try:
            for name, held, whole in _holders(json.loads(part)):
                each = _read(place, held, whole and name not in pieces)
                if name and each.receipt is not None:
                    pieces.pop(name, None)
                if name and held.get("finish_reason", "") is None and "receipt" not in held:
                    pieces.setdefault(name, each)
                else:
                    found.append(each)
        except RecursionError:
            found.append(FoundReceipt(place, None, "its JSON is nested too deeply"))
        except ValueError as error:
            found.append(FoundReceipt(place, None, f"it is no JSON: {error}"))
    found += pieces.values()
    return found or [FoundReceipt(str(path), None, NONE_HERE)]


def _holders(told: Any) -> Iterator[tuple[str, Any, bool]]:
    """What is or has a receipt, or should; choices under a name which their stream's pieces share,
    and whether they are whole: no piece tells what a reply has used."""
    if isinstance(told, list):
        for each in told:
            yield from _holders(each)
    elif isinstance(told, dict) and isinstance(choices := told.get("choices"), list):
        for place, each in enumerate(choices):
            choice = each if isinstance(each, dict) else {}
            name = f"{told.get('id')} {choice.get('index', place)}"
            yield name, choice, isinstance(told.get("usage"), dict) or "message" in choice
    elif isinstance(told, dict) and "receipts" in told:
        yield from _holders(told["receipts"])
    else:
        yield "", told, isinstance(told, dict) and "message" in told


def _read(place: str, held: Any, whole: bool) -> FoundReceipt:
    if not isinstance(held, dict):
        return FoundReceipt(place, None, NONE_HERE)
    if "receipt" not in held and "digests" not in held:
        of_choice = f"choice {held['index']}: " if "index" in held else ""
        return FoundReceipt(place, None, of_choice + NONE_HERE)
    beside = held if "receipt" in held else {}
    try:
        return FoundReceipt(place, read_receipt(held.get("receipt", held)), "", beside, whole)
    except ReceiptError as error:
        return FoundReceipt(place, None, str(error))
