"""What the shards of a step send each other, as bytes (`actors.packed_arrays`)."""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.candidates import Candidates
from lexshard.actors.head.softmax.whole_softmax import Cut, PartialMass
from lexshard.actors.messages import Certificate, Guarantee, NeedKind
from lexshard.actors.packed_arrays import encode, read_array
from lexshard.kernels.mass import Outline

Ids = npt.NDArray[np.int32]
# Of a `Certificate`, without their names.
CertificateFields = tuple[NeedKind, Guarantee, str, int, int, float, bool, float, float]
_fields_of = attrgetter(*Certificate.__dataclass_fields__)


class FoundRows(msgspec.Struct, frozen=True, array_like=True):
    """The candidates of N rows from one shard, of which the root knows processors and tokens: of
    rows with every token of the shard, ids do not travel."""

    certificates: tuple[CertificateFields, ...]  # [N]
    counts: npt.NDArray[np.int64]  # [N]
    ids: Ids
    raw: npt.NDArray[np.float32]  # [sum of the counts]


decode_outlines = msgspec.msgpack.Decoder(list[Outline | None], dec_hook=read_array).decode
decode_plans = msgspec.msgpack.Decoder(list[int | None]).decode
decode_bounds = msgspec.msgpack.Decoder(list[PartialMass], dec_hook=read_array).decode
decode_cuts = msgspec.msgpack.Decoder(list[Cut | None]).decode
_decode_rows = msgspec.msgpack.Decoder(FoundRows, dec_hook=read_array).decode


def pack_candidates(found: Candidates, owned: int) -> bytes:
    """What a shard of ``owned`` tokens has found."""
    counts = np.diff(found.offsets)
    named = found.ids[np.repeat(counts != owned, counts)]
    certificates = tuple(map(_fields_of, found.certificates))
    return encode(FoundRows(certificates, counts, named, found.raw))


def unpack_candidates(message: bytes, owned: Ids) -> Candidates:
    """What `pack_candidates` packed of a shard of the tokens ``owned``."""
    rows = _decode_rows(message)
    whole = rows.counts == len(owned)
    every = np.repeat(whole, rows.counts)
    ids = np.empty(len(rows.raw), np.int32)
    ids[~every] = rows.ids
    ids[every] = np.tile(owned, int(whole.sum()))
    return Candidates(
        ids=ids,
        raw=rows.raw,
        offsets=np.concatenate([[0], np.cumsum(rows.counts)]).astype(np.int64),
        certificates=tuple(Certificate(*fields) for fields in rows.certificates),
    )
