"""A device that drafts with the demo's draft model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

from lexshard.actors.edge.drafting import EdgeSettings, warm_up
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.edge.client import EdgeClient, EdgeModel, load_model
from tests.support.paths import DEMO_DRAFT

SETTINGS = EdgeSettings()


@lru_cache
def model() -> EdgeModel:
    return load_model(str(DEMO_DRAFT))


@asynccontextmanager
async def device(
    url: str, settings: EdgeSettings = SETTINGS, key: str | None = None
) -> AsyncIterator[EdgeClient]:
    """One that has found its server at ``url``."""
    warm_up(model().drafter, settings, 16_384)
    client = EdgeClient(url, key, model(), settings)
    client.start()
    try:
        while client.away is not None:
            assert client.failure is None, client.failure
            await asyncio.sleep(0.02)
        yield client
    finally:
        await client.stop()


async def text_of(client: EdgeClient, request: Request) -> tuple[int, ...]:
    """What it says to one sequence; fails where that ends with an error."""
    stream, events = client.submit([request]), list[SequenceEvent]()
    while not events or events[-1].finish_reason is None:
        events += await stream.arrived()
    assert events[-1].error is None, events[-1].error
    return tuple(token for event in events for token in event.token_ids)
