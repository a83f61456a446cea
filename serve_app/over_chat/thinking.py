"""How much a model is to think before it answers, in the words of its own chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

EFFORT = "reasoning_effort"
# Variables by which templates let models think, or not.
SWITCHES = ("enable_thinking", "thinking")
NO_THINKING = "none"
# Where a chat completion has another name.
EFFORTS = {"max": "xhigh"}
Reads = Callable[[str], bool]


def thinking_fields(reads: Reads, effort: str | None, on: bool | None) -> dict[str, Any]:
    """Fields of a chat completion that say whether thinking is ``on`` and with which ``effort``,
    None for as the model does. Both are wishes: what its template does not read is left out.
    ``reads`` tells whether it reads a variable."""
    told: dict[str, Any] = {}
    switch = next(filter(reads, SWITCHES), None)
    if on is not None and switch is not None:
        told["chat_template_kwargs"] = {switch: on}
    if on is False:
        effort = NO_THINKING if switch is None else None
    if effort is not None and reads(EFFORT):
        told[EFFORT] = EFFORTS.get(effort, effort)
    return told
