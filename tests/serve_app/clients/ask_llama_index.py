"""LlamaIndex's model for servers that are like OpenAI's, and its agent, which reads the types of a
function as they stand (not as ``annotations`` of the future)."""

import asyncio

from asked import CHAT, MOST, Booking, Day, Told, free_tables, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike


def chat(url: str, key: str, model: str) -> Told:
    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key=key,
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0.0,
        max_tokens=MOST,
        max_retries=0,
    )
    asking = [ChatMessage(CHAT)]
    plain = llm.chat(asking).message.content
    pieces = [piece.delta for piece in llm.stream_chat(asking) if piece.delta]
    told = Told(plain or "", pieces, llm.structured_predict(Booking, PromptTemplate(CHAT)))

    def told_tables(day: Day) -> str:
        """How many tables are free on a day."""
        told.called.append(day)
        return free_tables(day)

    agent = FunctionAgent(llm=llm, tools=[told_tables], initial_tool_choice="told_tables")

    async def run() -> str:
        return str(await agent.run(CHAT))

    told.answer = asyncio.run(run())
    return told


if __name__ == "__main__":
    report(chat)
