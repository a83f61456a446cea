"""What a server did when on the way to its first token, by what it printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

# "[  1.3 s] engine: loading the weights". These seconds count from the start of whichever process
# printed them, so the moment a line came is what counts here.
_LINE = re.compile(r'\[ *\d+\.\d s\] ([^"\n]+)')
_READY = "lexshard is ready"
_WAITING = "not ready"  # says that something else goes on
BEFORE, LAST = "imports, options and checks", "ready to first token"


def phases(
    lines: Sequence[tuple[float, str]], healthy: float, first_token: float
) -> dict[str, float]:
    """The seconds of each phase, in order; their sum is ``first_token``.

    ``lines`` are what the server printed, each with the moment it came; moments are seconds from
    the start of the process. A phase begins with its line and lasts until that of the next; the
    last begins when the server says that it is ready, or when somebody finds it ``healthy``.
    """
    marks = [(0.0, BEFORE)]
    for seconds, line in lines:
        if seconds >= healthy or _READY in line:
            healthy = min(seconds, healthy)
            break
        told = _LINE.search(line)
        if told is not None and not told[1].startswith(_WAITING):
            marks.append((seconds, told[1].strip()))
    marks.append((healthy, LAST))
    found: dict[str, float] = {}
    ends = [seconds for seconds, _ in marks[1:]] + [first_token]
    for (seconds, name), end in zip(marks, ends, strict=True):
        found[name] = found.get(name, 0.0) + end - seconds
    return found
