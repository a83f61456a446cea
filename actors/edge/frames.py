"""What crosses the thin link, bit by bit: batches of guesses one way, verdicts the other.

A batch says the number that it has among the session's batches (modulo 256), the position of its
first guess in prompt and output, how many guesses there are, and how many tokens the target may
draw alone after what they bring; then of each guess the token (``same-token``), or what it was
drawn from and which of these tokens it is. A verdict says which batch it answers, how many tokens
there are from that batch's position on before its own, and which token that is: those that were not
told before are the batch's guesses. Bits stand most significant first, the last byte is filled up
with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    # A server that hears of tokens alone needs nothing that compiles: the others import it below.
    from lexshard.kernels.lattice import Lattice

EdgeMode = Literal["same-token", "ksqs", "csqs", "qs"]
VERSION = 1
VERSION_BITS, NUMBER_BITS, POSITION_BITS, COUNT_BITS = 4, 8, 24, 8
HEADER_BITS = VERSION_BITS + NUMBER_BITS + POSITION_BITS + 2 * COUNT_BITS
VERDICT_BITS = VERSION_BITS + NUMBER_BITS + COUNT_BITS  # and the token
MOST_GUESSES = (1 << COUNT_BITS) - 1
NUMBERS = 1 << NUMBER_BITS


class FrameError(ValueError):
    """Bytes that no frame has."""


@dataclass(frozen=True, slots=True, eq=False)
class GuessBatch:
    """Guesses from ``position`` on; ``lattices`` are what they were drawn from, none where the
    other side draws with the same noise. Behind them it may draw ``alone`` tokens unaided."""

    number: int
    position: int
    token_ids: tuple[int, ...]
    lattices: tuple[Lattice, ...] = ()
    alone: int = 0


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """``token_id`` stands ``place`` tokens behind the position of batch ``number``."""

    number: int
    place: int
    token_id: int


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """How both ends of a session read bits.

    ``resolution`` is what counts sum to; ``size`` how many tokens a distribution has in mode
    ``ksqs``. In ``csqs`` each says so itself, in ``qs`` it has the whole vocabulary.
    """

    mode: EdgeMode
    vocabulary_size: int
    resolution: int = 100
    size: int = 32

    @property
    def token_bits(self) -> int:
        return (self.vocabulary_size - 1).bit_length()

    def guess_bits(self, lattice: Lattice | None) -> int:
        """Bits of one guess in a batch, by what it was drawn from."""
        if lattice is None:
            return self.token_bits
        size = len(lattice.ids)
        from lexshard.kernels.lattice import lattice_bits

        told = lattice_bits(self.vocabulary_size, size, self.resolution) + _place_bits(lattice)
        return told + (self.token_bits if self.mode == "csqs" else 0)

    def encode(self, batch: GuessBatch) -> bytes:
        """Raises ValueError for a batch that this mode cannot say."""
        bits = _Writer(batch.number)
        bits.write(batch.position, POSITION_BITS)
        bits.write(len(batch.token_ids), COUNT_BITS)
        bits.write(batch.alone, COUNT_BITS)
        if self.mode == "same-token":
            for token_id in batch.token_ids:
                bits.write(token_id, self.token_bits)
            return bits.content()
        from lexshard.kernels.lattice import encode, lattice_bits

        for token_id, lattice in zip(batch.token_ids, batch.lattices, strict=True):
            size = len(lattice.ids)
            if self.mode == "csqs":
                bits.write(size - 1, self.token_bits)
            elif size != self._size:
                raise ValueError(f"a distribution has {size} tokens, not {self._size}")
            number = encode(lattice, self.vocabulary_size)
            bits.write(number, lattice_bits(self.vocabulary_size, size, self.resolution))
            bits.write(_likely(lattice).index(token_id), _place_bits(lattice))
        return bits.content()

    def decode(self, content: bytes) -> GuessBatch:
        """Raises `FrameError`."""
        bits = _Reader(content)
        position, count = bits.read(POSITION_BITS), bits.read(COUNT_BITS)
        alone = bits.read(COUNT_BITS)
        token_ids: list[int] = []
        lattices: list[Lattice] = []
        for _ in range(count):
            if self.mode == "same-token":
                token_ids.append(self._token(bits))
                continue
            lattice = self._lattice(bits)
            likely = _likely(lattice)
            place = bits.read(_place_bits(lattice))
            if place >= len(likely):
                raise FrameError("a guess is none of the tokens that it was drawn from")
            token_ids.append(likely[place])
            lattices.append(lattice)
        bits.end()
        return GuessBatch(bits.number, position, tuple(token_ids), tuple(lattices), alone)

    def encode_verdict(self, verdict: BatchVerdict) -> bytes:
        bits = _Writer(verdict.number)
        bits.write(verdict.place, COUNT_BITS)
        bits.write(verdict.token_id, self.token_bits)
        return bits.content()

    def decode_verdict(self, content: bytes) -> BatchVerdict:
        """Raises `FrameError`."""
        bits = _Reader(content)
        place, token_id = bits.read(COUNT_BITS), self._token(bits)
        bits.end()
        return BatchVerdict(bits.number, place, token_id)

    @property
    def _size(self) -> int:
        return self.vocabulary_size if self.mode == "qs" else min(self.size, self.vocabulary_size)

    def _token(self, bits: _Reader) -> int:
        token_id = bits.read(self.token_bits)
        if token_id >= self.vocabulary_size:
            raise FrameError(f"token {token_id} is beyond the {self.vocabulary_size} there are")
        return token_id

    def _lattice(self, bits: _Reader) -> Lattice:
        size = self._size
        if self.mode == "csqs":
            size = bits.read(self.token_bits) + 1
            if size > self.vocabulary_size:
                raise FrameError(
                    f"{size} tokens are more than the {self.vocabulary_size} there are"
                )
        from lexshard.kernels.lattice import decode, lattice_bits, least_bits

        if least_bits(self.vocabulary_size, size, self.resolution) > bits.left:
            raise FrameError(
                "the frame ends within a distribution"
            )  # its width alone costs half a second
        width = lattice_bits(self.vocabulary_size, size, self.resolution)
        try:
            return decode(bits.read(width), self.vocabulary_size, size, self.resolution)
        except ValueError as error:
            raise FrameError(str(error)) from None


class _Writer:
    """A frame about batch ``number``, while it is written."""

    def __init__(self, number: int) -> None:
        self._content = 0
        self._width = 0
        self.write(VERSION, VERSION_BITS)
        self.write(number % NUMBERS, NUMBER_BITS)

    def write(self, value: int, width: int) -> None:
        if not 0 <= value < 1 << width:
            raise ValueError(f"{value} does not fit {width} bits")
        self._content = self._content << width | value
        self._width += width

    def content(self) -> bytes:
        filling = -self._width % 8
        return (self._content << filling).to_bytes((self._width + filling) // 8, "big")


class _Reader:
    """A frame while it is read; ``number`` is its batch's."""

    def __init__(self, content: bytes) -> None:
        self._content = int.from_bytes(content, "big")
        self.left = 8 * len(content)
        if self.read(VERSION_BITS) != VERSION:
            raise FrameError(f"this is no frame of version {VERSION}")
        self.number = self.read(NUMBER_BITS)

    def read(self, width: int) -> int:
        if width > self.left:
            raise FrameError("the frame ends within a field")
        self.left -= width
        value = self._content >> self.left
        self._content &= (1 << self.left) - 1
        return value

    def end(self) -> None:
        if self.left >= 8 or self._content:
            raise FrameError("the frame goes on behind its end")


def _likely(lattice: Lattice) -> list[int]:
    """The tokens that can be drawn."""
    return lattice.ids[lattice.counts > 0].tolist()


def _place_bits(lattice: Lattice) -> int:
    return (int(np.count_nonzero(lattice.counts)) - 1).bit_length()
