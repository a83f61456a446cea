"""Ranks that share no memory: a socket to the partner of every round.

Connections are neither encrypted nor authenticated beyond a key that members of a group greet each
other with: the network must be a private one. What arrives is added up, and never executed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import numpy as np

from lexshard.actors.body.parallel.messages import MeetGroup
from lexshard.cluster.link import PeerLostError
from lexshard.kernels.parallel import ROWS_AT_ONCE, Exchange, rounds_of

KEY_BYTES = 16
# After how many seconds a machine that says nothing is asked whether it is there, after how many
# again, and how often; each where the system has it.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_GREETING = struct.Struct(f"<{KEY_BYTES}sq")  # the key, the rank that greets


class SocketMeeting:
    """Rank ``rank`` of ``ranks``, which listens at ``host``. ``seconds`` is how long any may keep
    another waiting, in a step or to meet."""

    def __init__(self, rank: int, ranks: int, hidden: int, seconds: float, host: str) -> None:
        self._rank, self._ranks, self._seconds = rank, ranks, seconds
        self._host = host
        self._listener: socket.socket | None = None
        self._partners: list[socket.socket] = []
        self._scratch = np.zeros((1, 1, ROWS_AT_ONCE * hidden), np.float32)
        self.exchange = self._of([])

    def form(self) -> tuple[str, int]:
        """See `cluster.ranks.server.Meeting`."""
        self.leave()
        self._listener = socket.create_server((self._host, 0))
        self._listener.settimeout(self._seconds)
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def meet(self, told: MeetGroup) -> None:
        """Connects to partners of higher ranks, then hears from those of lower ones. Raises
        PeerLostError where one does not come in time."""
        partners = [self._rank ^ (1 << turn) for turn in range(rounds_of(self._ranks))]
        met: dict[int, socket.socket] = {}
        try:
            for partner in partners:
                if partner > self._rank:
                    met[partner] = greeted(
                        told.places[partner], told.key, self._rank, self._seconds
                    )
            while len(met) < len(partners):
                assert self._listener is not None, "it has formed a group"
                partner, end = heard(self._listener, told.key, self._seconds)
                if partner in partners and partner not in met:
                    met[partner] = end
                else:
                    end.close()
        except OSError as error:
            for end in met.values():
                end.close()
            raise PeerLostError(f"a rank did not meet the others: {error}") from error
        self._partners = [met[partner] for partner in partners]
        for end in self._partners:
            _give_up_after(end, self._seconds)
        self.exchange = self._of([end.fileno() for end in self._partners])

    def leave(self) -> None:
        """Partners that wait for this rank stop waiting."""
        self.exchange.sockets.fill(-1)  # their numbers may soon be others'
        for end in (*self._partners, *([] if self._listener is None else [self._listener])):
            end.close()
        self._partners, self._listener = [], None

    def _of(self, sockets: Sequence[int]) -> Exchange:
        return Exchange(
            self._rank,
            len(sockets),
            0,
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
            self._scratch,
            np.array(sockets, np.int64),
        )


def greeted(place: tuple[str, int], key: bytes, rank: int, seconds: float) -> socket.socket:
    """A connection to who listens at ``place``, from ``rank``. Raises OSError."""
    end = socket.create_connection(place, seconds)
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sendall(_GREETING.pack(key, rank))
    except OSError:
        end.close()
        raise
    return end


def heard(listener: socket.socket, key: bytes, seconds: float) -> tuple[int, socket.socket]:
    """Who has connected to ``listener`` with the ``key``. Others are sent away. Raises OSError
    where no peer comes in the listener's time."""
    while True:
        end, _ = listener.accept()
        end.settimeout(seconds)
        try:
            found, rank = _GREETING.unpack(end.recv(_GREETING.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            found, rank = b"", -1
        if found == key:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return rank, end
        end.close()


def notice_loss(end: socket.socket) -> None:
    """A read at ``end`` notices that the other's machine has vanished, though no end of the
    connection was told. One that only computes may do so for as long as it takes."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _give_up_after(end: socket.socket, seconds: float) -> None:
    """Blocking calls of compiled code end in time: Python's own time-outs are of its own calls."""
    end.setblocking(True)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, direction, limit)
