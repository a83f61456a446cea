"""Where clients reach a server: an address that is free, and the certificate it shows there."""

from __future__ import annotations

import socket
from pathlib import Path

from lexshard.cluster.config import ServeConfig


def check_port(host: str, port: int) -> None:
    """Raises:
    OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def certificate_with_key(config: ServeConfig) -> bytes | None:
    """What HAProxy reads from one file; None without HTTPS.

    Raises:
        OSError: a file cannot be read.
    """
    files = [file for file in (config.ssl_certfile, config.ssl_keyfile) if file is not None]
    return b"\n".join(Path(file).read_bytes() for file in files) if files else None
