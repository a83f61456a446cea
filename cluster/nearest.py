"""What was probably meant by a name that is unknown."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 64  # that is compared with others: it takes longer than all else of a refusal


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about ``name``, which is none of those ``known``: the one that was
    probably meant. Empty where none is near."""
    near = get_close_matches(name, known, n=1) if len(name) <= LONGEST_NAME else ()
    return f": did you mean {near[0]}?" if near else ""
