"""Messages of any length in a stream of bytes: each stands behind its length. Used by every socket
between processes of a server (`cluster.engine.transport`, `cluster.samplers.message_socket`)."""

from __future__ import annotations

from collections.abc import Iterator

LENGTH_BYTES = 4


def framed(message: bytes) -> bytes:
    """``message`` behind its length."""
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


class Frames:
    """Messages out of a stream, which comes in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def cut(self, piece: bytes) -> Iterator[bytes]:
        """The messages that end in ``piece``."""
        buffer = self._buffer
        buffer += piece
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            begin = start + LENGTH_BYTES
            stop = begin + int.from_bytes(buffer[start:begin], "little")
            if stop > len(buffer):
                break
            yield bytes(buffer[begin:stop])
            start = stop
        del buffer[:start]
