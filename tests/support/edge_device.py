"""A device that drafts with the demo's draft model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache

from lexshard.actors.edge.drafting import warm_up
from lexshard.actors.edge.settings import EdgeSettings
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.edge.client import EdgeClient
from lexshard.serve_app.edge.model import EdgeModel, load_model
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.paths import DEMO_DRAFT

SETTINGS = EdgeSettings()


@lru_cache
def model() -> EdgeModel:
    return load_model(str(DEMO_DRAFT))


def tokenizer() -> ModelTokenizer:
    return model().tokenizer


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


async def events_of(client: EdgeClient, request: Request) -> list[SequenceEvent]:
    """What it says to one sequence, to its end."""
    stream = client.submit([request])
    events: list[SequenceEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await stream.arrived()
    return events


async def text_of(client: EdgeClient, request: Request) -> tuple[int, ...]:
    """The tokens; fails where it ends with an error."""
    events = await events_of(client, request)
    assert events[-1].error is None, events[-1].error
    return tuple(token for event in events for token in event.token_ids)
