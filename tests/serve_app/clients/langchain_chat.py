"""One of LangChain's chat models, asked as LangChain does: both of its packages share it."""

from __future__ import annotations

from asked import CHAT, Booking, Day, FreeTables, Told, free_tables
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool


def told_by(chat: BaseChatModel) -> Told:
    pieces = [piece.text for piece in chat.stream(CHAT) if piece.text]
    booking = chat.with_structured_output(Booking, method="json_schema").invoke(CHAT)
    told = Told(chat.invoke(CHAT).text, pieces, booking)

    @tool("free_tables", args_schema=FreeTables)
    def told_tables(day: Day) -> str:
        """How many tables are free on a day."""
        told.called.append(day)
        return free_tables(day)

    asking = HumanMessage(CHAT)
    # Else nothing says that there are no other arguments, and a small model makes up more and more.
    calling = chat.bind_tools([told_tables], tool_choice="any", strict=True).invoke([asking])
    results = [told_tables.invoke(call) for call in calling.tool_calls]
    answer = chat.bind_tools([told_tables]).invoke([asking, calling, *results])
    told.answer = answer.text
    return told
