"""What clients have open: in the one API process of a server, or in all of them, by a memory that
all of them read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.openai.errors import overloaded

CLIENTS_WITHOUT_SEQUENCES = 4096  # as many as HAProxy has connections
_SEQUENCES = 0  # the first number of a process; then come the requests, then the waiting tokens


@dataclass(slots=True)
class Account:
    """What one client has open. A request without sequences is a request all the same."""

    requests: int = 0
    waiting: int = 0


class LocalAccounts:
    """Those of a server with one API process: no other counts, no other dies."""

    def __init__(self) -> None:
        self.sequences = 0
        self.waiting_tokens = 0
        self._clients: dict[str, Account] = {}

    def alone(self) -> AbstractContextManager[None]:
        """Inside the ``with`` no other enters. What is asked of accounts is asked inside one."""
        return nullcontext()

    def forget_the_dead(self) -> bool:
        """Takes back what dead processes had taken; whether there was any."""
        return False

    def of(self, client: str) -> Account:
        """A picture of it."""
        return self._clients.get(client) or Account()

    def others_waiting(self, client: str, most: int) -> int:
        """The waiting tokens of all other clients, at most so many of each."""
        return sum(
            min(account.waiting, most) for name, account in self._clients.items() if name != client
        )

    def enter(self, client: str, requests: int, sequences: int) -> None:
        """A client that enters is known until it has left as often; that needs no `alone`."""
        self._clients.setdefault(client, Account()).requests += requests
        self.sequences += sequences

    def add_waiting(self, client: str, tokens: int) -> None:
        self.waiting_tokens += tokens
        self._clients[client].waiting += tokens

    def leave(self, client: str, requests: int, sequences: int) -> None:
        self.sequences -= sequences
        account = self._clients[client]
        account.requests -= requests
        if not account.requests:
            del self._clients[client]


class SharedAccounts:
    """The same as `LocalAccounts`, of several processes: an account for every client with an open
    request in any of them, found by 128 bits of a hash of its name.

    A process changes its own numbers only: those of requests where it is alone, after it has read
    those of all; what becomes less, at any time. An account is free where no process has a request
    on it. There are ``max_sequences`` and `CLIENTS_WITHOUT_SEQUENCES`: with more clients than that
    that have something open, new ones are told to try again.

    What a process had open that is gone counts until `forget_the_dead`: too much for a moment,
    never too little.
    """

    def __init__(self, seats: Seats, max_sequences: int) -> None:
        self._seats = seats
        self._count = count = max_sequences + CLIENTS_WITHOUT_SEQUENCES
        self._numbers = numbers = seats.memory("accounts", 1 + 2 * count, np.int64)
        self._requests = numbers[:, 1 : 1 + count]
        self._waiting = numbers[:, 1 + count :]
        self._names = seats.common_memory("clients", 2 * count, np.uint64).reshape(2, count)
        # All accounts from this one on have never been used.
        self._used = seats.common_memory("used", 1, np.int64)
        self._rows: dict[str, int] = {}  # of clients with requests in this process
        self._looked_up: dict[str, int | None] = {}  # as long as it is alone
        with seats.alone():
            numbers[seats.own] = 0

    @property
    def sequences(self) -> int:
        return int(self._numbers[:, _SEQUENCES].sum())

    @property
    def waiting_tokens(self) -> int:
        return int(self._waiting[:, : self._used[0]].sum())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises:
        ApiError: 503 where another process has stopped while it was alone.
        """
        try:
            with self._seats.alone():
                self._looked_up.clear()
                yield
        except TimeoutError as error:
            raise overloaded(f"{error}; try again") from error

    def forget_the_dead(self) -> bool:
        forgotten = False
        for seat in self._seats.vacant():
            if self._numbers[seat].any():
                self._numbers[seat] = 0
                forgotten = True
        return forgotten

    def of(self, client: str) -> Account:
        row = self._find(client)
        if row is None:
            return Account()
        return Account(int(self._requests[:, row].sum()), int(self._waiting[:, row].sum()))

    def others_waiting(self, client: str, most: int) -> int:
        waiting = np.minimum(self._waiting[:, : self._used[0]].sum(axis=0), most)
        row = self._find(client)
        return int(waiting.sum()) - (0 if row is None else int(waiting[row]))

    def enter(self, client: str, requests: int, sequences: int) -> None:
        """Raises:
        ApiError: 503 where there are no more accounts.
        """
        row = self._find(client)
        if row is None:
            row = self._opened(client)
        self._rows[client] = row
        own = self._seats.own
        self._requests[own, row] += requests
        self._numbers[own, _SEQUENCES] += sequences

    def add_waiting(self, client: str, tokens: int) -> None:
        self._waiting[self._seats.own, self._rows[client]] += tokens

    def leave(self, client: str, requests: int, sequences: int) -> None:
        own, row = self._seats.own, self._rows[client]
        self._numbers[own, _SEQUENCES] -= sequences
        self._requests[own, row] -= requests
        if not self._requests[own, row]:
            del self._rows[client]

    def _find(self, client: str) -> int | None:
        row = self._rows.get(client)
        if row is None and client not in self._looked_up:
            first, second = _name(client)
            names = self._names[:, : self._used[0]]
            [found] = ((names[0] == first) & (names[1] == second)).nonzero()
            self._looked_up[client] = row = int(found[0]) if found.size else None
        return self._looked_up[client] if row is None else row

    def _opened(self, client: str) -> int:
        """A free account, in this client's name now."""
        used = int(self._used[0])
        free = self._free(used)
        if not free.size and used == self._count and self.forget_the_dead():
            free = self._free(used)
        if free.size:
            row = int(free[0])
        elif used < self._count:
            row = used
            self._used[0] = used + 1
        else:
            raise overloaded(f"{used} clients have requests open; try again")
        self._names[:, row] = _name(client)
        return row

    def _free(self, used: int) -> npt.NDArray[np.intp]:
        [free] = (self._requests[:, :used].sum(axis=0) == 0).nonzero()
        return free


def _name(client: str) -> tuple[np.uint64, np.uint64]:
    digest = hashlib.blake2b(client.encode(errors="surrogateescape"), digest_size=16).digest()
    first, second = np.frombuffer(digest, np.uint64)
    return first, second
