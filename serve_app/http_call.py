"""One request with a body, and the server that it came to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from lexshard.serve_app.openai.prompts import TextReader
from lexshard.serve_app.openai.workers import Returned
from lexshard.serve_app.request_body import read_json
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState


@dataclass(frozen=True, slots=True)
class HttpCall:
    """What every route that takes a body is called with."""

    state: ServerState
    request: Request
    record: RequestRecord

    async def read(self, understand: Callable[[Any], Returned]) -> Returned:
        """What ``understand`` makes of the decoded body, in a thread where that is long; raises as
        `read_json` does. Whatever takes longer for a longer body belongs into it."""
        return await read_json(self.request, self.state, self.record.client, understand)

    def reader(self) -> TextReader:
        """Raises:
        ApiError: 503 while there is no engine to ask for its context.
        """
        context = self.state.information().max_model_len
        return TextReader(self.state.tokenizer, context, self.request.receive)

    async def run(self, size: int, work: Callable[[], Returned]) -> Returned:
        """What ``work`` makes of ``size`` bytes of text, for as long as the client is there; raises
        as `TextWorkers.run` does."""
        return await self.state.tokenizer.workers.run(size, work, self.request.receive)

    def without_sequences(self) -> AbstractContextManager[None]:
        """For what only asks the tokenizer: it is let in for as long as the ``with`` takes.

        Raises:
            ApiError: 429 for a client with too much open.
        """
        return self.state.admission.admit(self.record.client, 0, 0).released()
