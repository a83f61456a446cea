"""How a process waits for another without spinning, and notices its death.

Each holds one end of a Unix socket pair. A byte says "look again"; the end of the stream says that
the other process is gone, which the kernel sends also after kill -9.
"""

from __future__ import annotations

import select
import socket

_RING = b"\0"
_BYTES_AT_ONCE = 4096


class PeerLostError(ConnectionError):
    """The process at the other end has gone."""


class Doorbell:
    """One end. The other must live in one other process only, or its death cannot be seen."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def ring(self) -> None:
        """Wakes the other side. Raises `PeerLostError` where it is gone."""
        try:
            self._socket.send(_RING, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # it has not heard thousands of earlier rings yet: it will look
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerLostError("the other process has gone") from error

    def wait(self, seconds: float | None) -> bool:
        """Waits for a ring, at most ``seconds`` (None: for ever); whether there was one.

        Raises `PeerLostError` where the other side is gone.
        """
        if not self._poll.poll(None if seconds is None else max(0.0, seconds * 1000)):
            return False
        try:
            heard = self._socket.recv(_BYTES_AT_ONCE, socket.MSG_DONTWAIT)
        except ConnectionResetError:
            heard = b""
        if not heard:
            raise PeerLostError("the other process has gone")
        return True

    def close(self) -> None:
        self._socket.close()
