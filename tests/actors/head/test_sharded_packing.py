"""What shards send each other arrives as it was, and says no less than what it stands for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.sharded.announcements import (
    StepAnnouncement,
    announce,
    decode_announcement,
)
from lexshard.actors.head.sharded.packing import (
    decode_bounds,
    decode_cuts,
    decode_outlines,
    decode_plans,
    pack_candidates,
    unpack_candidates,
)
from lexshard.actors.head.softmax.whole_softmax import EVERYTHING, Cut, PartialMass, decide_mass
from lexshard.actors.messages import Certificate, NeedKind
from lexshard.actors.packed_arrays import encode
from lexshard.actors.states.deltas import Deltas, OpenSequence
from lexshard.actors.states.mask import Masks, ToldMasks
from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowNames, flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels.masks import mask_words
from lexshard.kernels.mass import Outline
from lexshard.kernels.truncate import truncate
from tests.support.sharded_cases import every_kind_of_request, same_candidates

settings.register_profile("packing", deadline=None, max_examples=40)
settings.load_profile("packing")

OWNED = np.arange(3, 203, 2, dtype=np.int32)


def a_part(random: np.random.Generator, ids: np.ndarray) -> PartialMass:
    logits = random.standard_normal(len(ids)).astype(np.float32).round(int(random.integers(0, 3)))
    return PartialMass(ids, logits, *random.standard_normal(3), int(random.integers(0, 100)))


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6))
def test_candidates_arrive_bit_for_bit(seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    kept = [random.random(len(OWNED)) < random.choice([0.0, 0.1, 1.0]) for _ in range(rows)]
    ids = [OWNED[own] for own in kept]
    kinds: list[NeedKind] = ["topk", "dense", "nucleus"] * 2
    found = Candidates(
        ids=np.concatenate(ids),
        raw=random.standard_normal(sum(map(len, ids))).astype(np.float32),
        offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        certificates=tuple(
            Certificate(
                kind,
                str(random.choice(["deterministic", "probabilistic", "relaxed", "dense"])),  # type: ignore[arg-type]
                str(random.choice(["int8", "dense-fp32", "int4-dither"])),
                int(random.integers(0, 1 << 20)),
                int(random.integers(0, 1 << 60)),
                *random.random(1),
                bool(random.integers(2)),
                *random.random(2),
            )
            for kind in kinds[:rows]
        ),
    )
    same_candidates(unpack_candidates(pack_candidates(found, 100), OWNED), found)


@given(seed=st.integers(0, 2**32))
def test_bounds_and_cuts_arrive_bit_for_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [a_part(random, OWNED[random.random(100) < 0.2]) for _ in range(5)]
    for ours, theirs in zip(decode_bounds(encode(parts)), parts, strict=True):
        assert encode(ours) == encode(theirs)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.logits.tobytes() == theirs.logits.tobytes()
    cuts = [None, EVERYTHING, Cut(float(np.float32(0.1)), 7)]
    assert decode_cuts(encode(cuts)) == cuts


@given(seed=st.integers(0, 2**32))
def test_outlines_and_plans_arrive_bit_for_bit(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [
        Outline(
            int(random.integers(-(2**50), 2**50)),
            random.integers(0, 9, bins := int(random.integers(0, 5))).astype(np.int32),
            random.random(bins).astype(np.float32),
            float(random.random()),
        )
        if random.random() < 0.7
        else None
        for _ in range(5)
    ]
    found = decode_outlines(encode(parts))
    assert [part is None for part in found] == [part is None for part in parts]
    assert encode(found) == encode(parts)
    plans = [None, 0, -(2**50), 2**50]
    assert decode_plans(encode(plans)) == plans


@given(seed=st.integers(0, 2**32), shards=st.integers(1, 4))
def test_a_cut_tells_each_shard_its_part_of_the_nucleus(seed: int, shards: int) -> None:
    """With ties and excluded tokens: what all of them keep is what truncation keeps."""
    random = np.random.default_rng(seed)
    size = 60
    logits = random.standard_normal(size).astype(np.float32).round(1)
    logits[random.random(size) < 0.1] = -np.inf
    logits[int(random.integers(size))] = 1.0
    owner = random.integers(0, shards, size)
    nothing_outside = (-np.inf, -np.inf, -np.inf, 0)
    parts = [
        PartialMass(
            np.flatnonzero(owner == r).astype(np.int32), logits[owner == r], *nothing_outside
        )
        for r in range(shards)
    ]
    need = Need("nucleus", top_p=float(random.uniform(0.1, 0.9)), inverse_temperature=1.0)
    cut = decide_mass(need, parts)
    assert cut is not None
    kept = np.sort(np.concatenate([part.ids[cut.keeps(part)] for part in parts]))
    expected = truncate(logits, inverse_temperature=1.0, top_p=need.top_p)
    assert kept.tolist() == np.flatnonzero(expected).tolist()
    for part in parts:
        assert EVERYTHING.keeps(part).all()


def test_names_and_deltas_make_the_same_needs_elsewhere() -> None:
    random = np.random.default_rng(1)
    requests = every_kind_of_request(random, 200)
    masks = Masks(200)
    grammars = [masks.of(mask_words(random.integers(0, 200, 90), 200)) for _ in range(4)]
    here, there = (SequenceStates(200, (0,), 1) for _ in range(2))
    for name, request in enumerate(requests):
        here.open(name, request)
    opened = tuple(OpenSequence(name, request) for name, request in enumerate(requests))
    names = RowNames(
        tuple(name for name in range(len(requests)) for _ in range(3)),
        tuple((5, 6)[:count] for _ in requests for count in range(3)),
        masks=tuple(
            random.choice([None, *grammars]) if count % 2 else None
            for count in range(3 * len(requests))
        ),
    )
    table = here.table(names)
    told_here, told_there = ToldMasks(), ToldMasks()
    deltas = (Deltas(opened=opened),)
    arrived = decode_announcement(encode(announce(table, names, 8, told_here, deltas)))
    assert isinstance(arrived, StepAnnouncement)
    assert len(arrived.told) == len(grammars)
    again = decode_announcement(encode(announce(table, names, 8, told_here, deltas)))
    assert isinstance(again, StepAnnouncement)
    assert not again.told
    for deltas in arrived.deltas:
        there.apply(deltas)
    ids = np.arange(200, dtype=np.int32)
    found = arrived.table(there, told_there)
    assert again.table(there, told_there).flat.masks.tobytes() == found.flat.masks.tobytes()
    assert len(found) == len(table)
    for ours, theirs in ((each.need(row) for each in (table, found)) for row in range(len(table))):
        assert (ours.kind, ours.key, ours.position) == (theirs.kind, theirs.key, theirs.position)
        logits = [
            Candidates(ids, np.ones(200, np.float32), np.array([0, 200]), (), flat).logits
            for flat in (flatten_adjustments([each.adjustment]) for each in (ours, theirs))
        ]
        assert logits[0].tobytes() == logits[1].tobytes()
