"""The body of a streamed response as the network delivers it.

``iter_lines`` of HTTP clients waits for blocks of 1 KB: several tokens arrive at one moment then,
the first of them late.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

_MOST_BYTES = 1 << 16


@contextmanager
def opened_stream(
    url: str, body: bytes, headers: Mapping[str, str], seconds: float
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """POSTs ``body`` on a connection of its own: the status and the pieces of the answer, each as
    soon as it is there. Leaving early closes the connection, which is how a client cancels.

    ``seconds`` bound the wait for every piece. Raises OSError or ``http.client.HTTPException``.
    """
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    with closing(kind(address.netloc, timeout=seconds)) as connection:
        given = {"Content-Type": "application/json", "Connection": "close", **headers}
        connection.request("POST", address.path, body, given)
        with closing(connection.getresponse()) as response:
            yield response.status, iter(lambda: response.read1(_MOST_BYTES), b"")
