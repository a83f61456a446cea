"""Which trace a request belongs to: W3C Trace Context (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The caller's span, as its ``traceparent`` and ``tracestate`` name it."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of one request, before it is made. ``parent`` is None where it begins a trace."""

    trace_id: int
    span_id: int
    sampled: bool
    parent: RemoteParent | None = None

    @property
    def traceparent(self) -> str:
        """The header that names this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


def read_parent(traceparent: str | None, tracestate: str | None) -> RemoteParent | None:
    """The caller's span; None for what names none: the specification has it ignored."""
    match = _PARENT.fullmatch(traceparent or "")
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if not int(trace, 16) or not int(span, 16):
        return None
    sampled = bool(int(flags, 16) & _SAMPLED)
    return RemoteParent(int(trace, 16), int(span, 16), sampled, tracestate or "")


def new_trace_id() -> int:
    """Random, not 0."""
    return secrets.randbits(128) or 1


def new_span_id() -> int:
    """Random, not 0."""
    return secrets.randbits(64) or 1
