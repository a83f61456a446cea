"""Messages with arrays, as msgpack of the classes themselves: nothing that arrives is executed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from lexshard.actors.states.mask import Mask


@lru_cache
def _element(kind: Any) -> npt.DTypeLike:
    """The element type of ``NDArray[element]``."""
    return np.dtype(get_args(get_args(kind)[1])[0])


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mask):
        return value.pack()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} does not travel")


def read_array(kind: Any, value: bytes) -> npt.NDArray[Any] | Mask:
    """The ``dec_hook`` of decoders: an array of one dimension, or a mask."""
    if kind is Mask:
        return Mask.unpack(value)
    # Writable: compiled kernels tell read-only arrays apart, and would compile again for them.
    return np.frombuffer(value, _element(kind)).copy()


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
