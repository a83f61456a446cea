"""Who may come in: decided before a prompt is tokenised, counted until its last token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.openai.errors import bad_request, overloaded, rate_limited


class Ticket:
    """One admitted HTTP request: ``sequences`` to generate, ``waiting`` prompt tokens of which
    the engine has not answered yet."""

    __slots__ = ("_admission", "_open", "client", "sequences", "waiting")

    def __init__(self, admission: Admission, client: str, sequences: int, waiting: int) -> None:
        self._admission = admission
        self._open = True
        self.client = client
        self.sequences = sequences
        self.waiting = waiting

    def set_waiting(self, tokens: int) -> None:
        """Replaces the estimate once the prompt is tokenised; 0 once it is computed."""
        self._admission.waiting_tokens += tokens - self.waiting
        self.waiting = tokens

    def release(self) -> None:
        """Leaves; twice does no harm."""
        if self._open:
            self._open = False
            self.set_waiting(0)
            self._admission.leave(self)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """For the time in which nobody else would release it."""
        try:
            yield
        except BaseException:
            self.release()
            raise


class Admission:
    """Caps on sequences in flight, on prompt tokens waiting to be computed, and on one client's
    requests. None as a client limit is no limit."""

    def __init__(
        self, max_sequences: int, max_waiting_tokens: int, max_requests_per_client: int | None
    ) -> None:
        self.max_sequences = max_sequences
        self.max_waiting_tokens = max_waiting_tokens
        self.max_requests_per_client = max_requests_per_client
        self.sequences = 0
        self.waiting_tokens = 0
        self._clients: Counter[str] = Counter()

    def admit(self, client: str, sequences: int, estimated_tokens: int) -> Ticket:
        """Lets a request in, or says why not.

        A prompt longer than the whole waiting room comes in when the room is empty.

        Raises:
            ApiError: 400 when the request can never fit, 429 when this client has too many
                requests open, 503 when the server is full.
        """
        if sequences > self.max_sequences:
            raise bad_request(
                f"{sequences} sequences (prompts times n) are more than the "
                f"{self.max_sequences} this server runs at once",
                "n",
            )
        limit = self.max_requests_per_client
        if limit is not None and self._clients[client] >= limit:
            raise rate_limited(f"you have {limit} requests open, as many as one client may have")
        if self.sequences + sequences > self.max_sequences:
            raise overloaded(
                f"{self.sequences} of {self.max_sequences} sequences are running; try again"
            )
        waiting = self.waiting_tokens
        if waiting and waiting + estimated_tokens > self.max_waiting_tokens:
            raise overloaded(f"{waiting} prompt tokens are waiting to be computed; try again")
        self.sequences += sequences
        self.waiting_tokens += estimated_tokens
        self._clients[client] += 1
        return Ticket(self, client, sequences, estimated_tokens)

    def leave(self, ticket: Ticket) -> None:
        self.sequences -= ticket.sequences
        self._clients[ticket.client] -= 1
        if not self._clients[ticket.client]:
            del self._clients[ticket.client]
