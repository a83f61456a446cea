"""Arrays of a step as one buffer: what the shards know of the whole softmax, plans, cuts,
candidates.

Every buffer is of rows that both sides know, a record for each and then the ragged parts of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.whole_softmax import Cut, PartialMass
from lexshard.actors.messages import Certificate, Guarantee, NeedKind
from lexshard.kernels.mass import Outline

UNKNOWN = -1  # instead of a number of bins: this shard knows too little of the row
NO_PLAN = np.iinfo(np.int64).max
LONGEST_TIER_NAME = 16
_GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)

# Multiples of 8 bytes, so that what follows is aligned.
_CANDIDATE_ROW = np.dtype(
    [
        ("tier", f"S{LONGEST_TIER_NAME}"),
        ("bytes_read", "<i8"),
        ("opened_share", "<f8"),
        ("tightness", "<f8"),
        ("failure_probability", "<f8"),
        ("rescored_rows", "<i4"),
        ("tokens", "<i4"),
        ("guarantee", "u1"),
        ("fallback", "?"),
        ("every", "?"),  # token that the shard owns: ids do not travel
        ("", "V5"),
    ]
)
_MASS_ROW = np.dtype(
    [
        ("log_upper", "<f8"),
        ("log_lower", "<f8"),
        ("largest", "<f8"),
        ("tokens", "<i4"),
        ("outside_count", "<i4"),
    ]
)
_OUTLINE_ROW = np.dtype([("top", "<i8"), ("widest", "<f8"), ("bins", "<i4"), ("", "V4")])
_CUT_ROW = np.dtype([("logit", "<f4"), ("token_id", "<i4"), ("decided", "?"), ("", "V3")])

Ids = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class _Reader:
    """Takes arrays from the front of a buffer."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer = buffer
        self._offset = 0

    def take(self, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._buffer, dtype, count, self._offset)
        self._offset += array.nbytes
        return array


# -- candidates -----------------------------------------------------------------------------------


def pack_candidates(found: Candidates, owned: int) -> bytes:
    """What a shard of ``owned`` tokens has found. Processors stay: the root has its own.

    Raises ValueError for a tier whose name does not fit.
    """
    counts = np.diff(found.offsets)
    rows = np.zeros(len(found.certificates), _CANDIDATE_ROW)
    rows["tokens"] = counts
    rows["every"] = counts == owned
    for row, certificate in zip(rows, found.certificates, strict=True):
        tier = certificate.tier.encode()
        if len(tier) > LONGEST_TIER_NAME:
            raise ValueError(f"tier name {certificate.tier!r} exceeds {LONGEST_TIER_NAME} bytes")
        row["tier"] = tier
        row["guarantee"] = _GUARANTEES.index(certificate.guarantee)
        for name in (
            "fallback",
            "bytes_read",
            "opened_share",
            "tightness",
            "failure_probability",
            "rescored_rows",
        ):
            row[name] = getattr(certificate, name)
    named = found.ids[np.repeat(~rows["every"], counts)]
    return b"".join((rows.tobytes(), named.tobytes(), found.raw.tobytes()))


def unpack_candidates(message: bytes, kinds: Sequence[NeedKind], owned: Ids) -> Candidates:
    """What `pack_candidates` packed of rows of ``kinds``, of a shard of the tokens ``owned``."""
    reader = _Reader(message)
    rows = reader.take(_CANDIDATE_ROW, len(kinds))
    counts = rows["tokens"].astype(np.int64)
    every = np.repeat(rows["every"], counts)
    named = reader.take(np.int32, int(counts[~rows["every"]].sum()))
    raw = reader.take(np.float32, int(counts.sum()))
    ids = np.empty(len(raw), np.int32)
    ids[~every] = named
    ids[every] = np.tile(owned, int(rows["every"].sum()))
    return Candidates(
        ids=ids,
        raw=raw,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        certificates=tuple(
            Certificate(
                need=kind,
                guarantee=_GUARANTEES[row["guarantee"]],
                tier=row["tier"].decode(),
                rescored_rows=int(row["rescored_rows"]),
                bytes_read=int(row["bytes_read"]),
                opened_share=float(row["opened_share"]),
                fallback=bool(row["fallback"]),
                tightness=float(row["tightness"]),
                failure_probability=float(row["failure_probability"]),
            )
            for kind, row in zip(kinds, rows, strict=True)
        ),
    )


# -- the whole softmax ----------------------------------------------------------------------------


def pack_outlines(parts: Sequence[Outline | None]) -> bytes:
    """Where a shard's tokens lie in some rows."""
    rows = np.zeros(len(parts), _OUTLINE_ROW)
    known = [part for part in parts if part is not None]
    for row, part in zip(rows, parts, strict=True):
        row["bins"] = UNKNOWN if part is None else len(part.counts)
        if part is not None:
            row["top"], row["widest"] = part.top, part.widest
    counts = [part.counts.tobytes() for part in known]
    return b"".join((rows.tobytes(), *counts, *(part.errors.tobytes() for part in known)))


def unpack_outlines(message: bytes, count: int) -> list[Outline | None]:
    """What `pack_outlines` packed of ``count`` rows."""
    reader = _Reader(message)
    rows = reader.take(_OUTLINE_ROW, count)
    sizes = [max(int(bins), 0) for bins in rows["bins"]]
    counts = [reader.take(np.int32, size) for size in sizes]
    errors = [reader.take(np.float32, size) for size in sizes]
    return [
        None
        if row["bins"] == UNKNOWN
        else Outline(int(row["top"]), own_counts, own_errors, float(row["widest"]))
        for row, own_counts, own_errors in zip(rows, counts, errors, strict=True)
    ]


def pack_plans(plans: Sequence[int | None]) -> bytes:
    """From which bins on some rows are to be known exactly: 8 bytes each."""
    return np.array([NO_PLAN if plan is None else plan for plan in plans], np.int64).tobytes()


def unpack_plans(message: bytes) -> list[int | None]:
    """What `pack_plans` packed."""
    plans = np.frombuffer(message, np.int64).tolist()
    return [None if plan == NO_PLAN else plan for plan in plans]


def pack_bounds(parts: Sequence[PartialMass]) -> bytes:
    """What a shard knows of the softmax of some rows."""
    rows = np.zeros(len(parts), _MASS_ROW)
    for row, part in zip(rows, parts, strict=True):
        row["tokens"] = len(part.ids)
        row["log_upper"], row["log_lower"] = part.log_upper, part.log_lower
        row["largest"], row["outside_count"] = part.largest, part.outside_count
    ids = [part.ids.tobytes() for part in parts]
    return b"".join((rows.tobytes(), *ids, *(part.logits.tobytes() for part in parts)))


def unpack_bounds(message: bytes, count: int) -> list[PartialMass]:
    """What `pack_bounds` packed of ``count`` rows."""
    reader = _Reader(message)
    rows = reader.take(_MASS_ROW, count)
    ids = [reader.take(np.int32, int(size)) for size in rows["tokens"]]
    logits = [reader.take(np.float32, int(size)) for size in rows["tokens"]]
    return [
        PartialMass(
            own_ids,
            own_logits,
            float(row["log_upper"]),
            float(row["log_lower"]),
            float(row["largest"]),
            int(row["outside_count"]),
        )
        for row, own_ids, own_logits in zip(rows, ids, logits, strict=True)
    ]


def pack_cuts(cuts: Sequence[Cut | None]) -> bytes:
    """What was decided of some rows: 12 bytes each."""
    rows = np.zeros(len(cuts), _CUT_ROW)
    for row, cut in zip(rows, cuts, strict=True):
        if cut is not None:
            row["decided"], row["logit"], row["token_id"] = True, cut.logit, cut.token_id
    return rows.tobytes()


def unpack_cuts(message: bytes) -> list[Cut | None]:
    """What `pack_cuts` packed."""
    return [
        Cut(float(row["logit"]), int(row["token_id"])) if row["decided"] else None
        for row in np.frombuffer(message, _CUT_ROW)
    ]
