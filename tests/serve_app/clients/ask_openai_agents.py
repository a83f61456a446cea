"""OpenAI's agents, over chats and Responses. A tool that must be called must so once: then the
agent leaves the choice to the model."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import CHAT, MOST, Booking, Day, Told, free_tables, report
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)
USUAL = ModelSettings(temperature=0, max_tokens=MOST)


async def told_by(model: Model) -> Told:
    agent = Agent("plain", model=model, model_settings=USUAL)
    plain = (await Runner.run(agent, CHAT)).final_output
    pieces = []
    async for event in Runner.run_streamed(agent, CHAT).stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            pieces.append(event.data.delta)
    held = Agent("held", model=model, model_settings=USUAL, output_type=Booking)
    told = Told(plain, pieces, (await Runner.run(held, CHAT)).final_output)

    @function_tool(name_override="free_tables")
    def told_tables(day: Day) -> str:
        """How many tables are free on a day."""
        told.called.append(day)
        return free_tables(day)

    required = USUAL.resolve(ModelSettings(tool_choice="required"))
    calling = Agent("calling", model=model, model_settings=required, tools=[told_tables])
    told.answer = (await Runner.run(calling, CHAT)).final_output
    return told


def chat(url: str, key: str, model: str) -> Told:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    return asyncio.run(told_by(OpenAIChatCompletionsModel(model, client)))


def responses(url: str, key: str, model: str) -> Told:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    return asyncio.run(told_by(OpenAIResponsesModel(model, client)))


if __name__ == "__main__":
    report(chat, responses)
