"""Which requests may enter: decided before a prompt is tokenised, counted until its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lexshard.serve_app.api_processes.accounts import LocalAccounts, SharedAccounts
from lexshard.serve_app.openai.errors import ApiError, bad_request, overloaded, rate_limited


class Ticket:
    """One admitted HTTP request, of ``sequences`` to generate. Of its prompts, ``waiting`` tokens
    have not been answered by the engine yet."""

    __slots__ = ("_accounts", "_client", "_open", "_sequences", "waiting")

    def __init__(
        self, accounts: LocalAccounts | SharedAccounts, client: str, sequences: int
    ) -> None:
        self._accounts = accounts
        self._open = True
        self._client = client
        self._sequences = sequences
        self.waiting = 0
        accounts.enter(client, max(1, sequences), sequences)

    def set_waiting(self, tokens: int) -> None:
        """Replaces the estimate once the prompt is tokenised; 0 once it is computed."""
        self._accounts.add_waiting(self._client, tokens - self.waiting)
        self.waiting = tokens

    def release(self) -> None:
        """Leaves; twice does no harm."""
        if self._open:
            self._open = False
            self.set_waiting(0)
            self._accounts.leave(self._client, max(1, self._sequences), self._sequences)

    @contextmanager
    def released(self) -> Iterator[None]:
        """For what is over with the ``with``."""
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """For the time in which nothing else would release it."""
        try:
            yield
        except BaseException:
            self.release()
            raise


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
        self,
        max_sequences: int,
        max_waiting_tokens: int,
        max_requests_per_client: int | None,
        accounts: SharedAccounts | None = None,
    ) -> None:
        self.max_sequences = max_sequences
        self.max_waiting_tokens = max_waiting_tokens
        self.max_requests_per_client = max_requests_per_client
        self._accounts: LocalAccounts | SharedAccounts = accounts or LocalAccounts()
        shares = 1 if max_requests_per_client is None else 2
        self._share = max(1, max_waiting_tokens // shares)

    @property
    def sequences(self) -> int:
        return self._accounts.sequences

    @property
    def waiting_tokens(self) -> int:
        return self._accounts.waiting_tokens

    def admit(self, client: str, sequences: int, estimated_tokens: int) -> Ticket:
        """Lets a request in, or says why not; one that only asks the tokenizer has no sequences.

        A prompt longer than the whole waiting room comes in when the room is empty.

        Raises:
            ApiError: 400 when the request can never fit, 429 when this client has too much open,
                503 when the server is full.
        """
        with self._accounts.alone():
            try:
                self._check(client, sequences, estimated_tokens)
            except ApiError:
                if not self._accounts.forget_the_dead():
                    raise
                self._check(client, sequences, estimated_tokens)
            ticket = Ticket(self._accounts, client, sequences)
            ticket.set_waiting(estimated_tokens)
        return ticket

    def forget_the_dead(self) -> None:
        """So that what is counted is what lives, for metrics."""
        with suppress(ApiError), self._accounts.alone():
            self._accounts.forget_the_dead()

    def _check(self, client: str, sequences: int, tokens: int) -> None:
        account = self._accounts.of(client)
        self._check_places(account.requests, sequences)
        self._check_waiting(client, account.waiting, tokens)

    def _check_places(self, requests: int, sequences: int) -> None:
        limit = self.max_requests_per_client
        most = self.max_sequences if limit is None else min(limit, self.max_sequences)
        if sequences > most:
            raise bad_request(
                f"{sequences} sequences (prompts times n) are more than the {most} "
                + ("this server runs at once" if most != limit else "one client may have open"),
                "n",
            )
        if limit is not None and requests + max(1, sequences) > limit:
            raise rate_limited(
                f"you have {requests} of the {limit} requests open that one client may have "
                "(each of prompts times n counts as one)"
            )
        running = self.sequences
        if running + sequences > self.max_sequences:
            raise overloaded(f"{running} of {self.max_sequences} sequences are running; try again")

    def _check_waiting(self, client: str, own: int, tokens: int) -> None:
        if own and own + tokens > self._share:
            message = f"{own} of your prompt tokens are waiting to be computed; try again"
            raise (overloaded if self.max_requests_per_client is None else rate_limited)(message)
        others = self._accounts.others_waiting(client, self._share)
        if others and others + min(own + tokens, self._share) > self.max_waiting_tokens:
            raise overloaded(
                f"{self.waiting_tokens} prompt tokens are waiting to be computed; try again"
            )
