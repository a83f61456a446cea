"""How many files the processes of a server may have open: connections are files."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress

from lexshard.cluster.ingress import (
    FILES_OF_A_CONNECTION,
    MOST_CONNECTIONS,
    OTHER_FILES,
    connections_that_fit,
)
from lexshard.serve_app.start.readiness import StartupError

# With fewer the processes themselves do not start: libraries, sockets, shared memory.
LEAST_FILES, LEAST_FILES_ON_RAY = 256, 512


def make_room(on_ray: bool, tell: Callable[[str], None]) -> None:
    """Raises what this process and those it starts may have open as far as it goes, and tells where
    that is not enough for `MOST_CONNECTIONS`.

    Raises:
        StartupError: it is not enough to start with.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        most = max(allowed, FILES_OF_A_CONNECTION * MOST_CONNECTIONS + OTHER_FILES)
    least = LEAST_FILES_ON_RAY if on_ray else LEAST_FILES
    remedy = "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)"
    if most < least:
        raise StartupError(f"a process may open {most} files here, {least} are needed: {remedy}")
    wanted = min(most, FILES_OF_A_CONNECTION * MOST_CONNECTIONS + OTHER_FILES)
    if allowed < wanted:
        with suppress(ValueError, OSError):  # another system's own bounds: it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    connections = connections_that_fit()
    if connections < MOST_CONNECTIONS:
        tell(
            f"a process may open {most:,} files here: at most {connections:,} connections at once "
            f"instead of {MOST_CONNECTIONS:,}; for more {remedy}"
        )
