"""Ports for servers that are started on demand, and addresses that others reach."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RAYS = 20_000  # below it Ray's workers take theirs
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of the local machine on which nothing listens.

    Not one that the kernel hands out: a server takes a while to start, and Ray's many processes
    are given such ports meanwhile.
    """
    above = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 32_768
    choice = random.SystemRandom()
    while True:
        port = choice.randrange(RAYS, above) if above > RAYS else 0
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])


def own_address(host: str, port: int) -> str:
    """The address of this machine that packets to ``host`` leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
