"""Do two engines write the same tokens? Greedy outputs compared up to their first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a request's two outputs part."""

    request: int
    position: int
    ours: int
    theirs: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens before each request's first difference, of all tokens, and those differences.

    Tokens after a first difference follow other texts and are not compared.
    """

    equal_tokens: int
    tokens: int
    differences: tuple[Difference, ...]


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Agreement:
    """Compare outputs of the same requests, which have the same lengths."""
    equal = 0
    differences = []
    for request, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = list(zip(mine, other, strict=True))
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            equal += len(pairs)
        else:
            equal += parted
            differences.append(Difference(request, parted, mine[parted], other[parted]))
    return Agreement(equal, sum(map(len, ours)), tuple(differences))
