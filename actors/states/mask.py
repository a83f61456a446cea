"""Which tokens one row may draw, as data that travels: made from a list of ids or by a grammar."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lexshard.kernels.masks import Words, count_of, ids_of, mask_words

# Masks that are remembered: at most 32 KB each at 262,144 tokens.
REMEMBERED = 256


class Mask:
    """The tokens whose bits are set in ``words`` [ceil(V / 64)], which must not change.

    Rows that have the same mask share one object. ``number`` is how processes elsewhere know it;
    None for those that they make themselves, from the parameters of a request.
    """

    def __init__(self, words: Words, vocabulary_size: int, number: int | None = None) -> None:
        self.words = words
        self.number = number
        self._vocabulary_size = vocabulary_size

    @classmethod
    def of_ids(cls, ids: Iterable[int], vocabulary_size: int) -> Mask:
        """Those of ``ids`` that are tokens of the vocabulary."""
        return cls(mask_words(ids, vocabulary_size), vocabulary_size)

    def pack(self) -> bytes:
        """The mask for a process elsewhere that is not told its number."""
        return self._vocabulary_size.to_bytes(8, "little") + self.words.tobytes()

    @classmethod
    def unpack(cls, content: bytes) -> Mask:
        """What `pack` packed."""
        words = np.frombuffer(content, np.uint64, offset=8).copy()
        return cls(words, int.from_bytes(content[:8], "little"))

    @cached_property
    def count(self) -> int:
        """How many tokens it holds."""
        return int(count_of(self.words))

    @cached_property
    def ids(self) -> npt.NDArray[np.int32]:
        """The tokens it holds, in order."""
        return ids_of(self.words, self._vocabulary_size)


class Masks:
    """Masks by what they hold, so that rows of the same mask share one. The one that was asked for
    least lately is forgotten."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._known: OrderedDict[bytes, Mask] = OrderedDict()
        self._made = 0

    def of(self, words: Words) -> Mask:
        """The mask of ``words`` [ceil(V / 64)], which may be written over afterwards."""
        content = words.tobytes()
        mask = self._known.get(content)
        if mask is None:
            own = np.frombuffer(bytearray(content), np.uint64)
            mask = self._known[content] = Mask(own, self._vocabulary_size, self._made)
            self._made += 1
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(content)
        return mask


class ToldMasks:
    """Which masks a process elsewhere knows. Both ends keep one, see the same numbers in the same
    order, and so forget the same."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Words] = OrderedDict()

    def __getitem__(self, number: int) -> Words:
        return self._known[number]

    def unknown(self, masks: Iterable[Mask | None]) -> dict[int, Words]:
        """Those of ``masks`` that are still to be told, by number."""
        return {
            mask.number: mask.words
            for mask in masks
            if mask is not None and mask.number is not None and mask.number not in self._known
        }

    def see(self, used: Sequence[int | None], told: Mapping[int, Words]) -> None:
        """``told`` are told, and a step uses the masks ``used``."""
        self._known |= told
        for number in used:
            if number is not None:
                self._known.move_to_end(number)
        while len(self._known) > max(REMEMBERED, len(used)):
            self._known.popitem(last=False)
