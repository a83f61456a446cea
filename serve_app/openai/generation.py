"""One HTTP request while the engine works on it: submit, follow, cancel."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec.structs import replace

from lexshard.actors.messages import SequenceEvent
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.engine_client import EngineClient, EventStream
from lexshard.serve_app.openai.choice import Choice, Delta
from lexshard.serve_app.openai.errors import ApiError, bad_request, internal_error, overloaded
from lexshard.serve_app.request_record import RequestRecord

logger = logging.getLogger("lexshard.http")


class Generation:
    """The sequences of one HTTP request, whose prompt tokens it tells ticket and record; of which
    ``running`` have not come to their end.

    ``close`` must be called whatever happens.
    """

    def __init__(
        self,
        client: EngineClient,
        choices: Sequence[Choice],
        ticket: Ticket,
        record: RequestRecord,
    ) -> None:
        self.choices = choices
        self.running = len(choices)
        self.prompt_tokens = sum(len(choice.request.prompt_ids) for choice in self._first_choices)
        self._client = client
        self._ticket = ticket
        self._record = record
        self._stream: EventStream | None = None
        record.prompt_tokens, record.choices = self.prompt_tokens, len(choices)
        ticket.set_waiting(sum(choice.waiting_tokens for choice in choices))

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Deltas as they come; those of events that arrived together come together.

        Raises:
            ApiError: the engine refused or lost a sequence, whose text came before, as all did that
                arrived with it. One that it refuses amid its output only ends with the reason
                ``error``, unless no other comes to more.
        """
        by_id = {choice.request.request_id: choice for choice in self.choices}
        self._stream = stream = self._client.submit([choice.request for choice in self.choices])
        arrived_at = self._record.piece_times.append
        failure: ApiError | None = None
        while self.running:
            deltas: list[Delta] = []
            events = await stream.arrived()
            arrived_at(time.monotonic())
            for event in events:
                choice = by_id[event.request_id]
                if choice.finish_reason is not None:
                    continue
                fails = event.finish_reason in ("error", "abort")
                fails = fails and not self._fails_alone(event, choice)
                delta = choice.take(event)
                if fails and delta.finish_reason != "stop":  # it came to no stop string before
                    failure = failure or failure_of(event, self._record.request_id)
                    choice.error = None
                    if delta.first and not delta.token_ids:
                        continue
                    delta = replace(delta, finish_reason=None)
                if event.timing is not None:
                    self._record.note_timing(event.timing)
                deltas.append(delta)
                if delta.first:
                    self._note_first_token(choice.waiting_tokens)
                if delta.finish_reason is not None:
                    self.running -= 1
                    if event.finish_reason is None:  # a stop string: the engine goes on
                        self._client.cancel(event.request_id)
            if deltas:
                yield deltas
            if failure is not None:
                raise failure

    @property
    def completion_tokens(self) -> int:
        return sum(choice.generated for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Token counts. The n choices of a prompt share it: it counts once. Those of reasoning are
        told where replies may have some, or calls."""
        completion_tokens = self.completion_tokens
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.cached_tokens for choice in self._first_choices)
            },
        }
        if self.choices[0].parser is not None:
            thought = sum(choice.reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": thought}
        return usage

    @property
    def _first_choices(self) -> list[Choice]:
        """One choice of each prompt."""
        return [choice for choice in self.choices if choice.request.choice == 0]

    def close(self) -> None:
        """Cancels what runs and leaves the admission count; twice does no harm."""
        self._record.completion_tokens = self.completion_tokens
        if self._stream is not None:
            self._stream.close()
        self._ticket.release()

    def _note_first_token(self, prompt_tokens: int) -> None:
        self._ticket.set_waiting(max(0, self._ticket.waiting - prompt_tokens))
        if self._record.first_token_time is None:
            self._record.first_token_time = time.monotonic()

    def _fails_alone(self, event: SequenceEvent, choice: Choice) -> bool:
        others = (other for other in self.choices if other is not choice)
        begun = event.refused and choice.generated + len(event.token_ids) > 0
        return begun and any(other.finish_reason != "error" for other in others)


def failure_of(event: SequenceEvent, request_id: str) -> ApiError:
    """What a client is told of a sequence that ends with ``error`` or ``abort``."""
    reason = event.error or f"the engine ended the sequence ({event.finish_reason})"
    if event.refused:
        return bad_request(reason)
    if event.finish_reason == "abort":
        return overloaded(reason)
    told = {"fields": {"request_id": request_id}}
    logger.error("id=%s engine error: %s", request_id, reason, extra=told)
    return internal_error(request_id)
