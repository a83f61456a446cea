"""Pydantic AI's agents over chats, Responses and Messages."""

from __future__ import annotations

import asyncio
from typing import Any

from asked import CHAT, MOST, Booking, Day, Told, free_tables, report
from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

USUAL = ModelSettings(temperature=0, max_tokens=MOST)


def settings(context: RunContext[Any]) -> ModelSettings:
    """A tool is to be called first; then the model is free."""
    return USUAL | {"tool_choice": "required" if context.run_step == 1 else "auto"}


async def told_by(model: Model) -> Told:
    agent = Agent(model, model_settings=USUAL)
    plain = await agent.run(CHAT)
    async with agent.run_stream(CHAT) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    held = await Agent(model, model_settings=USUAL, output_type=NativeOutput(Booking)).run(CHAT)
    by_tool = await Agent(model, model_settings=USUAL, output_type=Booking).run(CHAT)
    assert isinstance(by_tool.output, Booking)
    told = Told(plain.output, pieces, held.output)

    loop = Agent(model, model_settings=settings)

    @loop.tool_plain(name="free_tables")
    def told_tables(day: Day) -> str:
        """How many tables are free on a day."""
        told.called.append(day)
        return free_tables(day)

    told.answer = (await loop.run(CHAT)).output
    return told


def chat(url: str, key: str, model: str) -> Told:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    return asyncio.run(told_by(OpenAIChatModel(model, provider=provider)))


def responses(url: str, key: str, model: str) -> Told:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    return asyncio.run(told_by(OpenAIResponsesModel(model, provider=provider)))


def messages(url: str, key: str, model: str) -> Told:
    provider = AnthropicProvider(base_url=url, api_key=key)
    # Which models can be held to a schema it knows by Anthropic's names.
    profile = ModelProfile(supports_json_schema_output=True)
    return asyncio.run(told_by(AnthropicModel(model, provider=provider, profile=profile)))


if __name__ == "__main__":
    report(chat, responses, messages)
