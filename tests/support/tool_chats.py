"""Chats with tools over the mock engine: a tokenizer with marks, and what replies add up to."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lexshard.actors.messages import Request
from lexshard.actors.text.token_bytes import byte_level_alphabet
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.mock_engine import EOS, MockEngine, Script

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}"
    "{% if message['tool_call_id'] %} {{ message['name'] }} {{ message['tool_call_id'] }}"
    "{% endif %}>"
    "{% if message['reasoning'] %}<think>{{ message['reasoning'] }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call.function.name }}:"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% endif %}{% endif %}"
)
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
SHELL: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "shell",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "lark", "definition": "start: /[a-z]+/"},
        },
    },
}
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "clock", "arguments": "{}"},
}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "1", "content": "12:00"}


def tool_tokenizer(template: str = TEMPLATE, marks: tuple[str, ...] = ()) -> ModelTokenizer:
    """One token for each byte, and special ones for the end and each of the ``marks``."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>", *marks])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|begin|>"
    )
    wrapped.chat_template = template
    return ModelTokenizer(wrapped)


def saying(text: str, tokenizer: ModelTokenizer, step: int = 1) -> MockEngine:
    """An engine that says ``text``, so many tokens at a time, and then ends."""

    def script(_: Request) -> Script:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Script([*(ids[i : i + step] for i in range(0, len(ids), step)), (EOS,)])

    return MockEngine(script=script)


def added_up(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice make, with its ``finish_reason``."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
            for piece in delta.get("tool_calls", []):
                if "id" in piece:
                    assert piece["index"] == len(message["calls"])
                    message["calls"].append({**piece, piece["type"]: {**piece[piece["type"]]}})
                    continue
                call = message["calls"][piece["index"]]
                part, more = call[call["type"]], piece[call["type"]]
                text = "arguments" if call["type"] == "function" else "input"
                assert more.keys() == {text}
                part[text] += more[text]
    return message
