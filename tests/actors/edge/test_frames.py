"""Frames of the thin link: what is read is what was written, and nothing else is read."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.edge.frames import (
    NUMBER_BITS,
    NUMBERS,
    BatchVerdict,
    EdgeMode,
    FrameCodec,
    FrameError,
    GuessBatch,
)
from lexshard.actors.edge.lattice import Lattice
from lexshard.kernels.lattice import draw, quantise, sparsify

SIZE = 600
IDS = np.arange(SIZE, dtype=np.int32)
MODES: tuple[EdgeMode, ...] = ("same-token", "ksqs", "csqs", "qs")


def batch_of(mode: EdgeMode, count: int, seed: int) -> tuple[FrameCodec, GuessBatch]:
    random = np.random.default_rng(seed)
    codec = FrameCodec(mode, SIZE, resolution=int(random.integers(1, 120)), size=9)
    position = int(random.integers(0, 2**24))
    alone, ahead = seed % 256, bool(seed % 3)
    if mode == "same-token":
        token_ids = tuple(random.integers(0, SIZE, count).tolist())
        return codec, GuessBatch(seed % NUMBERS, position, token_ids, (), alone, ahead)
    lattices = []
    for _ in range(count):
        logits = (4 * random.standard_normal(SIZE)).astype(np.float32)
        most = {"ksqs": 9, "csqs": int(random.integers(1, SIZE)), "qs": 0}[mode]
        kept = sparsify(IDS, logits, inverse_temperature=1.0, most=most)
        lattices.append(Lattice(kept.ids, quantise(kept.probabilities, codec.resolution)))
    token_ids = tuple(
        draw(lattice.likely, lattice.logits, seed, place) for place, lattice in enumerate(lattices)
    )
    return codec, GuessBatch(seed % NUMBERS, position, token_ids, tuple(lattices), alone, ahead)


def laws(batch: GuessBatch) -> list[tuple[list[int], list[float]]]:
    """What its guesses were drawn from, and are tested by."""
    return [(each.likely.tolist(), each.logits.tolist()) for each in batch.lattices]


@settings(deadline=None)
@given(st.sampled_from(MODES), st.integers(0, 12), st.integers(0, 2**32))
def test_a_batch_is_read_as_it_was_written(mode: EdgeMode, count: int, seed: int) -> None:
    codec, batch = batch_of(mode, count, seed)
    content = codec.encode(batch)
    found = codec.decode(content)
    told = found.number, found.position, found.token_ids, len(found.lattices)
    assert told == (batch.number, batch.position, batch.token_ids, len(batch.lattices))
    assert (found.alone, found.ahead) == (batch.alone, batch.ahead)
    assert laws(found) == laws(batch)
    assert 0 <= 8 * len(content) - (48 + codec.batch_bits(batch)) < 8


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=13),
    st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=20),
    st.data(),
)
def test_so_is_a_verdict(untold: list[int], token_ids: list[int], data: st.DataObject) -> None:
    """On any batch, and with what the target drew alone behind it."""
    codec = FrameCodec("csqs", SIZE)
    batch = data.draw(st.integers(0, len(untold) - 1))
    stood = data.draw(st.integers(0, untold[batch]))
    verdict = BatchVerdict(batch, stood, tuple(token_ids))
    content = codec.encode_verdict(verdict, untold)
    assert codec.decode_verdict(content, untold) == verdict
    assert content[0] < 128  # as no array of msgpack begins
    for wrong in (content[:-1], content + b"\1", bytes([content[0] | 128]) + content[1:]):
        with contextlib.suppress(FrameError):
            assert codec.encode_verdict(codec.decode_verdict(wrong, untold), untold) == wrong


def test_a_token_of_128256_takes_17_bits_up_and_no_more_than_12_down() -> None:
    """Where one guess of a batch stands on the average, or more; one that the target draws alone
    takes 24, or 17.5 of sixteen that are told together."""
    codec = FrameCodec("same-token", 128_256)
    assert codec.guess_bits(None) == 17
    for guesses in range(32):
        verdict = BatchVerdict(1, guesses, (128_255,))
        assert 8 * len(codec.encode_verdict(verdict, (9, guesses))) == 24
    for tokens, bits in ((1, 24), (2, 40), (16, 280)):
        verdict = BatchVerdict(0, 0, (128_255,) * tokens)
        assert 8 * len(codec.encode_verdict(verdict, (0,))) == bits


def test_a_verdict_on_what_is_not_on_its_way_is_refused() -> None:
    codec = FrameCodec("same-token", SIZE)
    for batch, stood, why in ((2, 0, "batch 2 of 1"), (1, 7, "7 in the place of one of 5")):
        content = codec.encode_verdict(BatchVerdict(batch, stood, (5,)), (0, 7, 3))
        with pytest.raises(FrameError, match=why):
            codec.decode_verdict(content, (0, 4))


@settings(deadline=None)
@given(st.sampled_from(MODES), st.integers(0, 2**32), st.data())
def test_bytes_that_no_frame_has_are_refused_or_say_something_sound(
    mode: EdgeMode, seed: int, data: st.DataObject
) -> None:
    """A frame that was cut, lengthened or altered: refused, or read as one that could be sent."""
    codec, batch = batch_of(mode, 4, seed)
    content = bytearray(codec.encode(batch))
    kind = data.draw(st.sampled_from(("cut", "longer", "bit", "noise")))
    if kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "longer":
        content += data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "bit":
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << place % 8
    else:
        content = bytearray(bytes(1) + data.draw(st.binary(max_size=80)))
    try:
        found = codec.decode(bytes(content))
    except FrameError:
        return
    assert kind in ("bit", "noise")
    assert found.lattices or codec.encode(found) == bytes(content)
    assert all(0 <= token_id < SIZE for token_id in found.token_ids)
    assert all(each.counts.sum() == codec.resolution for each in found.lattices)


def one_guess(*fields: tuple[int, int], count: int = 1) -> bytes:
    """A batch of ``count``, by the values and their widths in bits that come behind its header."""
    header = (0, 1), (0, NUMBER_BITS), (0, 1), (0, 24), (count, 8), (0, 8)
    text = "".join(f"{value:0{width}b}" for value, width in (*header, *fields))
    return int(text.ljust(-(-len(text) // 8) * 8, "0"), 2).to_bytes(-(-len(text) // 8), "big")


def test_a_frame_that_claims_more_than_the_vocabulary_is_refused() -> None:
    content = one_guess((1_023, 10), (0, 800))
    with pytest.raises(FrameError, match="1023 in the place of one of 600"):
        FrameCodec("csqs", SIZE).decode(content)


@pytest.mark.timed
@pytest.mark.parametrize("bits", [16_000, 520_000])
def test_a_frame_that_claims_half_the_vocabulary_costs_nothing(bits: int) -> None:
    """Be it long enough for that."""
    codec = FrameCodec("csqs", 262_144)
    content = one_guess((131_071, 18), (0, bits))
    started = time.perf_counter()
    for _ in range(100):
        with pytest.raises(FrameError, match="more bits"):
            codec.decode(content)
    assert time.perf_counter() - started < 1.0


def whole_vocabularies(mode: EdgeMode) -> tuple[FrameCodec, bytes]:
    """255 guesses, each from all 262,144 tokens in one part: 18 bits say which token has it, behind
    18 that say how many are told of in mode ``csqs``."""
    told = ((262_143, 18),) * (mode == "csqs")
    fields = [field for place in range(255) for field in (*told, (place * 1_027, 18))]
    return FrameCodec(mode, 262_144, resolution=1), one_guess(*fields, count=255)


@pytest.mark.parametrize("mode", ["qs", "csqs"])
def test_a_short_frame_does_not_become_255_vocabularies(mode: EdgeMode) -> None:
    codec, content = whole_vocabularies(mode)
    assert len(content) < 1_200
    batch = codec.decode(content)
    assert len({*batch.token_ids}) == 255
    assert sum(each.ids.nbytes + each.counts.nbytes for each in batch.lattices) < 16 * 2**20


@pytest.mark.timed
def test_a_short_frame_takes_no_vocabulary_s_time_for_each_guess() -> None:
    codec, content = whole_vocabularies("csqs")
    started = time.process_time()
    codec.decode(content)
    assert time.process_time() - started < 1.0


@pytest.mark.timed
def test_a_long_frame_takes_no_longer_than_what_it_says() -> None:
    """64 KiB, of which 255 guesses are read."""
    codec = FrameCodec("same-token", SIZE)
    content = codec.encode(GuessBatch(1, 5, (7,) * 255)).ljust(65_536, b"\0")
    started = time.perf_counter()
    for _ in range(200):
        with pytest.raises(FrameError, match="behind its end"):
            codec.decode(content)
    assert time.perf_counter() - started < 1.0


def test_what_a_mode_cannot_say_is_refused() -> None:
    codec, batch = batch_of("csqs", 2, 3)
    with pytest.raises(ValueError, match="this is no guess"):
        FrameCodec("same-token", SIZE).encode(batch)
    with pytest.raises(ValueError, match="this is no guess"):
        codec.encode(GuessBatch(1, 1, (7,)))
    with pytest.raises(ValueError, match="a distribution has"):
        FrameCodec("ksqs", SIZE, codec.resolution, 3).encode(batch)
    with pytest.raises(ValueError, match="does not fit"):
        FrameCodec("same-token", SIZE).encode(GuessBatch(1, 1, (70_000,)))
