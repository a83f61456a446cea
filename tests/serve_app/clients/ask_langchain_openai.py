"""LangChain's chat model for OpenAI, over chats and over Responses."""

from __future__ import annotations

from asked import MOST, Told, report
from langchain_chat import told_by
from langchain_openai import ChatOpenAI


def chat(url: str, key: str, model: str, **options: bool) -> Told:
    usual = {"temperature": 0, "max_tokens": MOST, "max_retries": 0}
    return told_by(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, **usual, **options))


def responses(url: str, key: str, model: str) -> Told:
    return chat(url, key, model, use_responses_api=True)


if __name__ == "__main__":
    report(chat, responses)
