"""Who may come in: decided before a prompt is tokenised, counted until its last token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_app.openai.errors import bad_request, overloaded, rate_limited


class Ticket:
    """One admitted HTTP request: ``sequences`` to generate, ``waiting`` prompt tokens of which
    the engine has not answered yet."""

    __slots__ = ("_admission", "_open", "client", "sequences", "waiting")

    def __init__(self, admission: Admission, client: str, sequences: int) -> None:
        self._admission = admission
        self._open = True
        self.client = client
        self.sequences = sequences
        self.waiting = 0

    def set_waiting(self, tokens: int) -> None:
        """Replaces the estimate once the prompt is tokenised; 0 once it is computed."""
        self._admission.add_waiting(self.client, tokens - self.waiting)
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


@dataclass(slots=True)
class _Account:
    """What one client has open. A request without sequences is a request all the same."""

    requests: int = 0
    waiting: int = 0


def waiting_cost(prompt_tokens: int, choice: int, scored: bool) -> int:
    """What the engine computes of a prompt before this choice of it has begun.

    Choices share the blocks of their prompt: the first computes it. One that is scored (its own
    log-probabilities are wanted) is computed again for every choice.
    """
    return prompt_tokens if scored or choice == 0 else 0


class Admission:
    """What a request costs while it is open, in two currencies.

    * Places: one for each of its sequences (prompts times n), until the last of them ends. No
      sequence holds more KV blocks than a context has, whatever output it asks for: so places
      bound what output holds.
    * Waiting tokens: the `waiting_cost` of its choices, until each is computed. Output never
      waits and is not charged here: where there is no room for it, the engine lets it wait.

    ``max_requests_per_client`` None is no limit. Else a client may have so many requests open,
    where each of a request's sequences counts as one, and half of the waiting room. A longer prompt
    comes in when nothing else of its client waits, and takes no more than that half from others.
    """

    def __init__(
        self, max_sequences: int, max_waiting_tokens: int, max_requests_per_client: int | None
    ) -> None:
        self.max_sequences = max_sequences
        self.max_waiting_tokens = max_waiting_tokens
        self.max_requests_per_client = max_requests_per_client
        self.sequences = 0
        self.waiting_tokens = 0
        shares = 1 if max_requests_per_client is None else 2
        self._share = max(1, max_waiting_tokens // shares)
        self._clients: dict[str, _Account] = {}

    def admit(self, client: str, sequences: int, estimated_tokens: int) -> Ticket:
        """Lets a request in, or says why not; one that only asks the tokenizer has no sequences.

        A prompt longer than the whole waiting room comes in when the room is empty.

        Raises:
            ApiError: 400 when the request can never fit, 429 when this client has too much open,
                503 when the server is full.
        """
        self._check_places(client, sequences)
        self._check_waiting(client, estimated_tokens)
        account = self._clients.setdefault(client, _Account())
        account.requests += max(1, sequences)
        self.sequences += sequences
        ticket = Ticket(self, client, sequences)
        ticket.set_waiting(estimated_tokens)
        return ticket

    def add_waiting(self, client: str, tokens: int) -> None:
        self.waiting_tokens += tokens
        self._clients[client].waiting += tokens

    def leave(self, ticket: Ticket) -> None:
        self.sequences -= ticket.sequences
        account = self._clients[ticket.client]
        account.requests -= max(1, ticket.sequences)
        if not account.requests:
            del self._clients[ticket.client]

    def _check_places(self, client: str, sequences: int) -> None:
        limit = self.max_requests_per_client
        most = self.max_sequences if limit is None else min(limit, self.max_sequences)
        if sequences > most:
            raise bad_request(
                f"{sequences} sequences (prompts times n) are more than the {most} "
                + ("this server runs at once" if most != limit else "one client may have open"),
                "n",
            )
        requests = self._account(client).requests
        if limit is not None and requests + max(1, sequences) > limit:
            raise rate_limited(
                f"you have {requests} of the {limit} requests open that one client may have "
                "(each of prompts times n counts as one)"
            )
        if self.sequences + sequences > self.max_sequences:
            raise overloaded(
                f"{self.sequences} of {self.max_sequences} sequences are running; try again"
            )

    def _check_waiting(self, client: str, tokens: int) -> None:
        own = self._account(client).waiting
        if own and own + tokens > self._share:
            message = f"{own} of your prompt tokens are waiting to be computed; try again"
            raise (overloaded if self.max_requests_per_client is None else rate_limited)(message)
        others = sum(
            min(account.waiting, self._share)
            for name, account in self._clients.items()
            if name != client
        )
        if others and others + min(own + tokens, self._share) > self.max_waiting_tokens:
            raise overloaded(
                f"{self.waiting_tokens} prompt tokens are waiting to be computed; try again"
            )

    def _account(self, client: str) -> _Account:
        return self._clients.get(client) or _Account()
