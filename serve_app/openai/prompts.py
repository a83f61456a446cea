"""From what a client wrote to the token ids of its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from actors.configuration import EngineInformation
from serve_app.openai.errors import bad_request
from serve_app.openai.protocol import MAX_PROMPTS, ChatFields
from serve_app.openai.tokenization import ModelTokenizer, off_loop_if_long

ROLES = ("system", "developer", "user", "assistant")
CHARACTERS_PER_TOKEN = 4
# Normalisers may merge characters before a token is made of them.
MERGED_CHARACTERS = 4
# Fields of OpenAI's own reply messages, which clients send back unchanged.
EMPTY_MESSAGE_FIELDS = (
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
)

RawPrompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is what the client wrote; None where it sent ids or the text was cut."""

    ids: tuple[int, ...]
    text: str | None


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def read_prompts(prompt: Any) -> list[RawPrompt]:
    """The prompts of a completion request: a text, texts, ids, or lists of ids.

    Raises:
        ApiError: 400 for anything else, for empty prompts and for too many.
    """
    if prompt is None:
        raise bad_request("'prompt' is required", "prompt")
    if prompt in ("", [], [[]]):
        raise bad_request("'prompt' must not be empty", "prompt")
    if isinstance(prompt, str) or is_token_ids(prompt):
        return [prompt]
    kind_is_right = isinstance(prompt, list) and (
        all(isinstance(item, str) for item in prompt) or all(map(is_token_ids, prompt))
    )
    if not kind_is_right:
        raise bad_request(
            "'prompt' must be a string, a list of strings, a list of token ids or a list of "
            "non-empty lists of token ids",
            "prompt",
        )
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"{len(prompt)} prompts are more than {MAX_PROMPTS}", "prompt")
    if "" in prompt:
        raise bad_request("'prompt' must not be empty", "prompt")
    return list(prompt)


def estimated_tokens(prompts: list[RawPrompt], context: int) -> int:
    """A guess made before tokenising, for admission. No prompt computes more than ``context``."""
    return sum(
        min(
            context,
            len(prompt) // CHARACTERS_PER_TOKEN + 1 if isinstance(prompt, str) else len(prompt),
        )
        for prompt in prompts
    )


def check_characters(
    characters: int, parameter: str, information: EngineInformation, tokenizer: ModelTokenizer
) -> None:
    """Spares the tokenizer a text that cannot fit: megabytes take it many seconds.

    Raises:
        ApiError: 400.
    """
    most = information.max_model_len * tokenizer.longest_token * MERGED_CHARACTERS
    if characters > most:
        raise bad_request(
            f"{characters} characters are more than the {information.max_model_len} tokens of "
            "this model's context can hold",
            parameter,
        )


async def encode_prompts(
    prompts: list[RawPrompt], add_special_tokens: bool, tokenizer: ModelTokenizer
) -> list[Prompt]:
    def encode() -> list[Prompt]:
        return [
            Prompt(tuple(tokenizer.encode(prompt, add_special_tokens)), prompt)
            if isinstance(prompt, str)
            else Prompt(tuple(prompt), None)
            for prompt in prompts
        ]

    characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await off_loop_if_long(characters, encode)


def check_and_truncate(prompt: Prompt, keep: int | None, information: EngineInformation) -> Prompt:
    """Keeps the last ``keep`` ids and checks what is left.

    Raises:
        ApiError: 400 when nothing is left or an id is no row of the model.
    """
    if keep is not None and len(prompt.ids) > keep:
        prompt = Prompt(prompt.ids[len(prompt.ids) - keep :], None)
    if not prompt.ids:
        raise bad_request("the prompt has no tokens", "prompt")
    if min(prompt.ids) < 0 or max(prompt.ids) >= information.vocabulary_size:
        raise bad_request(
            f"the prompt holds a token id outside 0..{information.vocabulary_size - 1}", "prompt"
        )
    return prompt


def read_messages(messages: list[Any]) -> list[dict[str, str]]:
    """The conversation as plain role and text.

    Raises:
        ApiError: 400 naming the message and what is wrong with it.
    """
    if not messages:
        raise bad_request("'messages' must not be empty", "messages")
    return [_read_message(message, f"messages.{i}") for i, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"'{where}' must be an object", where)
    role = message.get("role")
    if role in ("tool", "function"):
        raise bad_request(f"the role '{role}' is not implemented by this server", f"{where}.role")
    if role not in ROLES:
        raise bad_request(f"'{where}.role' must be one of {', '.join(ROLES)}", f"{where}.role")
    result = {"role": role, "content": _read_content(message.get("content"), f"{where}.content")}
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        if name == "name" and (value is None or isinstance(value, str)):
            if value is not None:
                result["name"] = value
        elif name not in EMPTY_MESSAGE_FIELDS or value not in (None, []):
            raise bad_request(
                f"'{where}.{name}' is not implemented by this server", f"{where}.{name}"
            )
    return result


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_request(f"'{where}' must be a string or a list of text parts", where)
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_request(
                f"'{where}.{i}' must be a part of type 'text': this model reads text only",
                f"{where}.{i}",
            )
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise bad_request(f"'{where}.{i}' must be {{'type', 'text'}} alone", f"{where}.{i}")
        texts.append(part["text"])
    return "\n".join(texts)


def conversation_characters(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


async def encode_conversation(
    body: ChatFields,
    messages: list[dict[str, str]],
    add_special_tokens: bool,
    tokenizer: ModelTokenizer,
) -> Prompt:
    """Renders the template and tokenises what it wrote.

    Raises:
        ApiError: 400 for contradicting flags, or what the template refuses.
    """
    continuing = bool(body.continue_final_message)
    if continuing and body.add_generation_prompt:
        raise bad_request(
            "'continue_final_message' and 'add_generation_prompt' exclude each other",
            "continue_final_message",
        )
    prompting = not continuing if body.add_generation_prompt is None else body.add_generation_prompt

    def encode() -> Prompt:
        text = tokenizer.render_chat(
            messages, prompting, continuing, body.chat_template_kwargs or {}
        )
        return Prompt(tuple(tokenizer.encode(text, add_special_tokens)), text)

    return await off_loop_if_long(conversation_characters(messages), encode)
