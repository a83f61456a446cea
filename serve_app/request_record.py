"""What is remembered of one HTTP request, for its log line, the metrics and its spans."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lexshard.actors.messages import SequenceTiming
from lexshard.serve_app.authentication import KeyOwner

if TYPE_CHECKING:
    from opentelemetry.trace import Span  # is in an extra

TRACEPARENT = "traceparent"  # of W3C Trace Context (https://www.w3.org/TR/trace-context/)


@dataclass(slots=True)
class RequestRecord:
    """Times are ``time.monotonic`` seconds.

    ``client`` sent it. ``lowest_priority`` is the first it may go (a lower ``priority`` goes
    earlier), ``cache_salt`` names the prefix cache their prompts share; authentication says both.

    ``piece_times`` are when tokens came from the engine, once a step. ``began`` is what the engine
    says of the time before its first token, ``ended`` what it says at the end; of several sequences
    it is the first one's that says so. ``trace`` is its span, None where none are made.
    """

    request_id: str
    method: str
    path: str
    client: str
    lowest_priority: int = 0
    cache_salt: str = ""
    start_time: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 1
    first_token_time: float | None = None
    piece_times: list[float] = field(default_factory=list)
    began: SequenceTiming | None = None
    ended: SequenceTiming | None = None
    trace: Span | None = None

    def is_of(self, owner: KeyOwner | None) -> None:
        """Whose key came with it; None where none is asked for."""
        if owner is not None:
            self.client = self.cache_salt = owner.name
            self.lowest_priority = owner.lowest_priority

    @property
    def traceparent(self) -> str | None:
        """The header that names its span."""
        if self.trace is None:
            return None
        own = self.trace.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_time

    @property
    def seconds_to_first_token(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.start_time

    def note_timing(self, timing: SequenceTiming) -> None:
        """What the engine tells of a sequence with its first event, or its last."""
        if self.began is None:
            self.began = timing
        self.ended = timing
