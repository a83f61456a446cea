"""A device that drafts with the demo's draft model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache

from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.client import EdgeClient, EdgeSettings, warm_up
from lexshard.serve_app.edge.server import load_drafter
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.paths import DEMO_DRAFT

SETTINGS = EdgeSettings()


@lru_cache
def drafter() -> GuessingModel:
    return load_drafter(str(DEMO_DRAFT))[0]


@lru_cache
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(DEMO_DRAFT)


@asynccontextmanager
async def device(
    url: str, settings: EdgeSettings = SETTINGS, key: str | None = None
) -> AsyncIterator[EdgeClient]:
    """One that has found its server at ``url``."""
    warm_up(drafter(), settings, 16_384)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    vocabulary = wire.vocabulary_hash(tokenizer().vocabulary())
    with ThreadPoolExecutor(1) as executor:
        client = EdgeClient(url, headers, drafter(), vocabulary, settings, executor)
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
