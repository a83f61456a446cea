"""Who is next among clients that compete: the one that has been served least.

The virtual token counters of "Fairness in Serving Large Language Models" (Sheng et al., 2024): what
a client's sequences are given is added to its counter, and the client with the smallest counter
goes first. A client that begins to wait starts with no less than the smallest counter of those
that wait already: none saves up while idle, and none pays for what no other wanted. Where places
are short, the counters of clients that wait all the time stay as close as what the sequences that
run at once may take.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator

from lexshard.actors.engine.sequence import Sequence


class FairShare:
    """The clients of one priority: what each was served, and its waiting sequences by arrival.

    A client is known while it has an unfinished sequence, and among the ``newcomers`` before one of
    its sequences has been let in.
    """

    def __init__(self) -> None:
        self.newcomers: set[str] = set()
        self._unfinished: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._waiting: dict[str, list[Sequence]] = {}  # no empty lists

    @property
    def idle(self) -> bool:
        return not self._unfinished

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_clients(self) -> Collection[str]:
        return self._waiting.keys()

    def waiting(self, client: str) -> Iterator[Sequence]:
        """The waiting sequences of a client in order of arrival. They may stop waiting
        meanwhile."""
        yield from tuple(self._waiting.get(client, ()))

    def open(self, sequence: Sequence) -> None:
        """A new sequence, which waits."""
        client = sequence.request.client
        if client not in self._unfinished:
            self.newcomers.add(client)
        self._unfinished[client] += 1
        self.wait(sequence)

    def close(self, sequence: Sequence) -> None:
        """A sequence that does not wait has ended."""
        client = sequence.request.client
        self._unfinished[client] -= 1
        if not self._unfinished[client]:
            del self._unfinished[client], self._served[client]
            self.newcomers.discard(client)

    def wait(self, sequence: Sequence) -> None:
        """A sequence, new or preempted, waits from now on."""
        client = sequence.request.client
        if client not in self._waiting:
            self._served[client] = max(self._served.get(client, 0), self._least_to_start_with())
            self._waiting[client] = []
        insort(self._waiting[client], sequence, key=lambda each: each.arrival)

    def _least_to_start_with(self) -> int:
        competing = [self._served[client] for client in self._waiting]
        # Where no client waits, all have had what they wanted.
        return min(competing) if competing else max(self._served.values(), default=0)

    def admit(self, sequence: Sequence) -> None:
        """A waiting sequence is let in."""
        self.newcomers.discard(sequence.request.client)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A waiting sequence does not wait any more."""
        client = sequence.request.client
        self._waiting[client].remove(sequence)
        if not self._waiting[client]:
            del self._waiting[client]

    def served(self, client: str) -> int:
        """What the client was given, in tokens of a step."""
        return self._served[client]

    def charge(self, client: str, cost: int) -> None:
        self._served[client] += cost

    def in_turn(self, clients: Collection[str]) -> list[str]:
        """``clients``, the least served first; equals in the order in which they came."""
        if len(clients) <= 1:
            return list(clients)
        return sorted((each for each in self._unfinished if each in clients), key=self.served)
