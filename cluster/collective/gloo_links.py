"""Links over TCP by torch's gloo: time-outs per wait, and a dead process is noticed at once.

The group is an object of its own, not torch's default one: a process may have several, leave one
and join another, and a program that uses `torch.distributed` for itself is not in the way.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, Store, TCPStore

from lexshard.actors.collective import (
    ROOT,
    CollectiveError,
    CollectiveLostError,
    CollectiveTimeoutError,
)

_TAG = 0
# Nothing waits for longer; a wait without a time-out waits for this.
_FOREVER = timedelta(days=3650)


def open_store(host: str, port: int, forming_seconds: float, *, root: bool) -> TCPStore:
    """Where the processes of a group find each other: ``root`` opens it, at any free port where
    ``port`` is 0 (see ``.port``), the others connect.

    It listens at ``host`` alone; torch by itself would at every address of the machine. Raises
    OSError where the root cannot, and `CollectiveTimeoutError` where there is no answer in time.
    """
    listener = socket.create_server((host, port)) if root else None
    try:
        return TCPStore(
            host,
            port if listener is None else listener.getsockname()[1],
            None,
            root,
            timeout=timedelta(seconds=forming_seconds),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except DistError as error:
        raise CollectiveTimeoutError(
            f"cannot reach the root at {host}:{port} within {forming_seconds:g} s: "
            f"{_first_line(error)}",
            ROOT,
        ) from error


class GlooLinks:
    """Process ``rank`` of ``size`` that meet at ``store`` under ``name``, which no other group of
    theirs has had. ``address`` is where this one listens for the others.

    Returns when all are connected. Raises `CollectiveTimeoutError` where they are not within
    ``forming_seconds``.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        address: str = "127.0.0.1",
        forming_seconds: float = 60.0,
    ) -> None:
        self.rank = rank
        self.size = size
        gloo: Any = ProcessGroupGloo  # its options are not in torch's stubs
        options = gloo._Options()
        options._timeout = timedelta(seconds=forming_seconds)
        options._devices = [gloo.create_device(hostname=address)]
        self._store = store  # the root's serves later members
        try:
            self._group: Any = gloo(PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"group {name} of {size} did not form within {forming_seconds:g} s: "
                f"{_first_line(error)}"
            ) from error

    def send(self, data: torch.Tensor, rank: int) -> GlooTransfer:
        return self._start("send", data, rank)

    def receive(self, into: torch.Tensor, rank: int) -> GlooTransfer:
        return self._start("recv", into, rank)

    def close(self) -> None:
        self._group = None

    def _start(self, verb: str, data: torch.Tensor, rank: int) -> GlooTransfer:
        if self._group is None:
            raise CollectiveError("this process has left its group")
        try:
            return GlooTransfer(getattr(self._group, verb)([data], rank, _TAG), rank)
        except RuntimeError as error:
            raise _translated(error, rank) from error


class GlooTransfer:
    """One message on its way to or from ``rank``."""

    __slots__ = ("_rank", "_work")

    def __init__(self, work: Any, rank: int) -> None:
        self._work = work
        self._rank = rank

    def wait(self, seconds: float | None) -> None:
        timeout = _FOREVER if seconds is None else timedelta(seconds=seconds)
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            self._work = None
            raise _translated(error, self._rank) from error


def _first_line(error: Exception) -> str:
    """Without the native stack that torch puts below it."""
    return str(error).partition("\n")[0]


def _translated(error: RuntimeError, rank: int) -> CollectiveError:
    text = _first_line(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return CollectiveTimeoutError(f"rank {rank} did not do its part in time: {text}", rank)
    return CollectiveLostError(f"rank {rank} has gone: {text}", rank)
