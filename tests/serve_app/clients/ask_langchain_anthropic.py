"""LangChain's chat model for Anthropic."""

from __future__ import annotations

from asked import MOST, Told, report
from langchain_anthropic import ChatAnthropic
from langchain_chat import told_by


def messages(url: str, key: str, model: str) -> Told:
    return told_by(
        ChatAnthropic(model=model, base_url=url, api_key=key, temperature=0, max_tokens=MOST)
    )


if __name__ == "__main__":
    report(messages)
