"""What is remembered of one HTTP request, for its log line and the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Times are ``time.monotonic`` seconds.

    ``client`` is who asks. ``lowest_priority`` is the first they may go (a lower ``priority`` goes
    earlier), ``cache_salt`` names the prefix cache their prompts share; authentication says both.
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
    first_token_time: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_time

    @property
    def seconds_to_first_token(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.start_time
