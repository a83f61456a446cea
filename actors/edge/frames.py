"""What crosses the thin link, bit by bit (docs/edge.md): guesses one way, verdicts the other. The
most significant bit stands first, zeros fill up the last byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from lexshard.actors.edge.lattice import Lattice, decode, encode, lattice_bits, least_bits
from lexshard.actors.messages import guesses_go_on

EdgeMode = Literal["same-token", "ksqs", "csqs", "qs"]
MOST_GUESSES = 255  # of a batch
MOST_RESOLUTION = 1_000  # parts of a distribution: 0.1 s to read one, ten times as many 2 s
VERSION = 7  # of frames, and of all that crosses a session: told when it begins
# Frames begin with one 0, which no array of msgpack does.
NUMBER_BITS, POSITION_BITS, COUNT_BITS = 6, 24, MOST_GUESSES.bit_length()
HEADER_BITS = 1, NUMBER_BITS, 1, POSITION_BITS, COUNT_BITS, COUNT_BITS
NUMBERS = 1 << NUMBER_BITS
PLACE_BITS = 4  # of a batch among those that have no answer
MOST_LATTICE_BITS = 16_384  # a code of half a large vocabulary takes a quarter of a minute


class FrameError(ValueError):
    """Bytes that no frame has."""


@dataclass(frozen=True, slots=True, eq=False)
class GuessBatch:
    """Guesses from ``position`` on, an index in prompt and output; ``lattices`` are what they were
    drawn from, none where the other side draws with the same noise. Behind what they bring it may
    draw ``alone`` tokens unaided. One that is ``ahead`` is built on the guess that all of the batch
    before it stand."""

    number: int
    position: int
    token_ids: tuple[int, ...]
    lattices: tuple[Lattice, ...] = ()
    alone: int = 0
    ahead: bool = False

    def goes_on_from(self, token_ids: Sequence[int]) -> bool:
        """Whether it is one behind ``token_ids``, a prompt and its output."""
        return guesses_go_on(self.position, self.token_ids, token_ids)


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Of the guesses of a batch that are not told yet ``stood`` stand; ``token_ids``, one at least,
    follow. ``batch`` counts those without an answer from 1 on; 0 is the one answered last."""

    batch: int
    stood: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FrameCodec:
    """How both ends of a session read bits. Counts sum to ``resolution``; a distribution has
    ``size`` tokens in mode ``ksqs``, in ``csqs`` as many as it says, in ``qs`` all."""

    mode: EdgeMode
    vocabulary_size: int
    resolution: int = 100
    size: int = 32

    @property
    def token_bits(self) -> int:
        return (self.vocabulary_size - 1).bit_length()

    @property
    def fixed_size(self) -> int:
        """Tokens of every distribution, but in ``csqs``."""
        return self.vocabulary_size if self.mode == "qs" else min(self.size, self.vocabulary_size)

    def guess_bits(self, lattice: Lattice | None) -> int:
        """Bits of one guess, by what it was drawn from."""
        if lattice is None:
            return self.token_bits
        told = lattice_bits(self.vocabulary_size, len(lattice.ids), self.resolution)
        return told + _place_bits(lattice) + (self.token_bits if self.mode == "csqs" else 0)

    def batch_bits(self, batch: GuessBatch) -> int:
        """Bits of its guesses."""
        return sum(map(self.guess_bits, batch.lattices or (None,) * len(batch.token_ids)))

    def encode(self, batch: GuessBatch) -> bytes:
        """Raises ValueError for a batch that this mode cannot say."""
        number = batch.number % NUMBERS
        header = 0, number, batch.ahead, batch.position, len(batch.token_ids), batch.alone
        fields = [*zip(header, HEADER_BITS, strict=True)]
        for token_id, lattice in zip_longest(batch.token_ids, batch.lattices):
            if (lattice is None) != (self.mode == "same-token"):
                raise ValueError(f"in mode {self.mode} this is no guess")
            if lattice is None:
                fields.append((token_id, self.token_bits))
                continue
            size = len(lattice.ids)
            if self.mode == "csqs":
                fields.append((size - 1, self.token_bits))
            elif size != self.fixed_size:
                raise ValueError(f"a distribution has {size} tokens, not {self.fixed_size}")
            width = lattice_bits(self.vocabulary_size, size, self.resolution)
            fields.append((encode(lattice, self.vocabulary_size), width))
            fields.append((lattice.likely.tolist().index(token_id), _place_bits(lattice)))
        return _packed(fields)

    def decode(self, content: bytes) -> GuessBatch:
        """Raises `FrameError`."""
        bits = _Reader(content)
        _, number, ahead, position, count, alone = map(bits.read, HEADER_BITS)
        token_ids: list[int] = []
        lattices: list[Lattice] = []
        for _ in range(count):
            if self.mode == "same-token":
                token_ids.append(bits.read(self.token_bits, self.vocabulary_size))
                continue
            lattices.append(self._lattice(bits))
            likely = lattices[-1].likely
            token_ids.append(int(likely[bits.read(_place_bits(lattices[-1]), len(likely))]))
        bits.end()
        return GuessBatch(number, position, tuple(token_ids), tuple(lattices), alone, bool(ahead))

    def encode_verdict(self, verdict: BatchVerdict, untold: Sequence[int]) -> bytes:
        """``untold`` are the guesses that are not told yet, of each batch as verdicts count."""
        place = ((1, 1),) if verdict.batch == 1 else ((0, 1), (verdict.batch, PLACE_BITS))
        stood = verdict.stood, untold[verdict.batch].bit_length()
        tokens = ((token_id, self.token_bits) for token_id in verdict.token_ids)
        return _packed(((0, 1), *place, stood, *tokens))

    def decode_verdict(self, content: bytes, untold: Sequence[int]) -> BatchVerdict:
        """Raises `FrameError`."""
        bits = _Reader(content)
        bits.read(1, 1)
        batch = bits.read(1) or bits.read(PLACE_BITS)
        if batch >= len(untold):
            raise FrameError(f"a verdict on batch {batch} of {len(untold) - 1}")
        stood = bits.read(untold[batch].bit_length(), untold[batch] + 1)
        token_ids = [bits.read(self.token_bits, self.vocabulary_size)]
        while bits.left >= max(8, self.token_bits):
            token_ids.append(bits.read(self.token_bits, self.vocabulary_size))
        bits.end()
        return BatchVerdict(batch, stood, tuple(token_ids))

    def _lattice(self, bits: _Reader) -> Lattice:
        size = self.fixed_size
        if self.mode == "csqs":
            size = 1 + bits.read(self.token_bits, self.vocabulary_size)
        shape = self.vocabulary_size, size, self.resolution
        if least_bits(*shape) > min(bits.left, MOST_LATTICE_BITS):  # the exact width takes long
            raise FrameError("a distribution takes more bits than there are, or may be")
        try:
            return decode(bits.read(lattice_bits(*shape)), *shape)
        except ValueError as error:
            raise FrameError(str(error)) from None


def _packed(fields: Iterable[tuple[int, int]]) -> bytes:
    """A frame of values and their widths in bits."""
    content = total = 0
    for value, width in fields:
        if not 0 <= value < 1 << width:
            raise ValueError(f"{value} does not fit {width} bits")
        content, total = content << width | value, total + width
    filling = -total % 8
    return (content << filling).to_bytes((total + filling) // 8, "big")


class _Reader:
    """A frame while it is read. A field takes the time of the bits up to its end."""

    def __init__(self, content: bytes) -> None:
        self._content = int.from_bytes(content, "big")
        self.left = 8 * len(content)

    def read(self, width: int, below: int | None = None) -> int:
        if width > self.left:
            raise FrameError("the frame ends within a field")
        self.left -= width
        value = self._content >> self.left & ((1 << width) - 1)
        if below is not None and value >= below:
            raise FrameError(f"{value} in the place of one of {below}")
        return value

    def end(self) -> None:
        if self.left >= 8 or self.read(self.left):
            raise FrameError("the frame goes on behind its end")


def _place_bits(lattice: Lattice) -> int:
    return (len(lattice.likely) - 1).bit_length()
