"""What has gone wrong last in a process: warnings and errors of its own log, for ``lexshard
status``."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

LOGGER = "lexshard"
MOST_FAULTS = 16


class LoggedFault(NamedTuple):
    """``time`` is in Unix seconds."""

    time: float
    text: str


class LastFaults(logging.Handler):
    """Keeps the last warnings and errors that it is handed, the latest one last."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._faults: deque[LoggedFault] = deque(maxlen=MOST_FAULTS)

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(LoggedFault(record.created, record.getMessage().splitlines()[0]))

    def told(self) -> list[LoggedFault]:
        """What has been kept until now."""
        return list(self._faults)


_of_this_process = LastFaults()


def listen_for_faults() -> LastFaults:
    """Those of this process, which are kept from the first call on."""
    logging.getLogger(LOGGER).addHandler(_of_this_process)
    return _of_this_process
