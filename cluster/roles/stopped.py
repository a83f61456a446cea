"""Whether a process that is waited for has been stopped (SIGSTOP): it neither ends nor answers.

That no answer comes proves nothing. A step may be large, a kernel may have to be compiled, and on
an overloaded machine everything takes long. But the system knows which processes have been stopped
("T" in /proc), and a slow, starved or sleeping one is never among them. So this is looked at again
and again while it is waited for, and a process counts as stopped for good once it was at every look
for a second. Looks are counted and not seconds, because the looker may have been stopped meanwhile.

Without /proc this cannot be told. A process held by a debugger ("t") is its user's affair.
"""

from __future__ import annotations

from pathlib import Path

LOOK_SECONDS = 0.1  # of waiting, before each look
LOOKS = 10


class StoppedProcess:
    """What has been seen of one process while it is waited for."""

    def __init__(self, process_id: int) -> None:
        self._status = Path(f"/proc/{process_id}/stat")
        self._seen = 0

    @property
    def for_good(self) -> bool:
        """Whether it was stopped at every one of the last `LOOKS` looks."""
        return self._seen >= LOOKS

    def look(self) -> bool:
        """Looks once more, after `LOOK_SECONDS` of waiting; whether it is stopped for good."""
        self._seen = self._seen + 1 if self.now() else 0
        return self.for_good

    def answered(self) -> None:
        """It has done something: what was seen before does not count."""
        self._seen = 0

    def now(self) -> bool:
        """Whether it is stopped at this moment."""
        try:
            status = self._status.read_bytes()
        except OSError:  # it has ended, or there is no /proc
            return False
        # "process id (name) state ...", where the name may hold anything.
        return status.rpartition(b")")[2].split()[:1] == [b"T"]
