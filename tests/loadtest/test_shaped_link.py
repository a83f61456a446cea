"""A shaped link is as slow as it says, keeps every byte in order, and can be cut."""

from __future__ import annotations

import asyncio
import time

import pytest

from lexshard.loadtest.shaped_link import RETRANSMIT_SECONDS, LinkShape, ShapedLink


async def through(shape: LinkShape, content: bytes, cut: bool = False) -> tuple[float, bytes]:
    """Seconds from sending ``content`` to hearing the last of it from one that echoes, and what."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(4096):
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, ShapedLink("127.0.0.1", port, shape) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        started = time.perf_counter()
        writer.write(content)
        if cut:
            await asyncio.sleep(0.05)
            assert link.cut() == 1
        heard = b""
        try:
            while len(heard) < len(content) and (piece := await reader.read(4096)):
                heard += piece
        except ConnectionResetError:
            pass
        writer.close()
        return time.perf_counter() - started, heard


@pytest.mark.timed
@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        (LinkShape(), 100_000, 0.0),
        (LinkShape(delay=0.1), 10, 0.2),
        (LinkShape(1e5), 2_500, 0.2 + 8 * 1400 / 1e5),  # its packets follow each other's heels
        (LinkShape(1e6, 0.05), 10_000, 0.08 + 8 * 1400 / 1e6 + 0.1),
        (LinkShape(loss=1.0), 10, 2 * RETRANSMIT_SECONDS),
    ],
)
def test_bytes_take_as_long_as_the_shape_says(shape: LinkShape, size: int, expected: float) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    seconds, heard = asyncio.run(through(shape, content[:size]))
    assert heard == content[:size]
    assert 0.9 * expected <= seconds < 1.5 * expected + 0.2


def test_jitter_changes_no_order() -> None:
    content = bytes(i % 251 for i in range(40_000))
    _, heard = asyncio.run(through(LinkShape(delay=0.02, jitter=0.02, loss=0.05), content))
    assert heard == content


@pytest.mark.timed
def test_a_cut_link_is_cut_at_once() -> None:
    seconds, heard = asyncio.run(through(LinkShape(1e5), bytes(10_000), cut=True))
    assert seconds < 0.5
    assert len(heard) < 10_000
