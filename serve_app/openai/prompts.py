"""From what a client wrote to the token ids of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import orjson

from lexshard.actors.configuration import EngineInformation
from lexshard.serve_app.openai.chat_fields import ChatFields, Message, template_messages
from lexshard.serve_app.openai.errors import bad_request, context_length_exceeded, not_implemented
from lexshard.serve_app.openai.protocol import MAX_PROMPTS, MAX_TEMPLATE_KWARGS_BYTES
from lexshard.serve_app.openai.tokenization import (
    BYTES_PER_TOKEN,
    ModelTokenizer,
    most_text_bytes,
    text_bytes,
)
from lexshard.serve_app.openai.workers import Receive, Returned

# So many texts of the greatest length may be in one request, or more shorter ones.
MAX_LONG_TEXTS = 4
# Of prompts that are tokenised at a time.
PIECE_BYTES = 65_536
# What rendering a message costs beside its text, in bytes of text tokenised in the same time.
BYTES_PER_MESSAGE = 64
# The same of a bad word.
BYTES_PER_WORD = 64
_ANCHOR = "\n"  # what a word follows that does not begin a text

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
        raise bad_request("'prompt' is required", "prompt", "missing_required_parameter")
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


def estimated_tokens(prompts: Sequence[RawPrompt], most: int) -> int:
    """A guess made before tokenising, for admission. No prompt keeps more than ``most``."""
    return sum(
        min(most, len(prompt) // BYTES_PER_TOKEN + 1 if isinstance(prompt, str) else len(prompt))
        for prompt in prompts
    )


def check_texts(sizes: Sequence[int], parameter: str, context: int) -> None:
    """Raises:
    ApiError: 400 for texts of more bytes than one request may have tokenised.
    """
    most = most_text_bytes(context)
    for size, limit, what in (
        (max(sizes, default=0), most, "a text"),
        (sum(sizes), most * MAX_LONG_TEXTS, "texts"),
    ):
        if size > limit:
            reason = (
                f"'{parameter}' holds {what} of {size} bytes; this server tokenises at most "
                f"{limit}, also where they are to be truncated"
            )
            if limit == most:
                raise context_length_exceeded(context, reason, parameter)
            raise bad_request(reason, parameter)


def check_and_truncate(
    prompt: Prompt, keep: int | None, information: EngineInformation, side: str | None = None
) -> Prompt:
    """Keeps the last ``keep`` ids, the first where the ``side`` to cut is right, and checks them.

    Raises:
        ApiError: 400 when nothing is left or an id is no row of the model.
    """
    if keep is not None and len(prompt.ids) > keep:
        kept = slice(keep) if side == "right" else slice(len(prompt.ids) - keep, None)
        prompt = Prompt(prompt.ids[kept], None)
    if not prompt.ids:
        raise bad_request("the prompt has no tokens", "prompt")
    if min(prompt.ids) < 0 or max(prompt.ids) >= information.vocabulary_size:
        raise bad_request(
            f"a token id is out of vocabulary: not in 0..{information.vocabulary_size - 1}",
            "prompt",
        )
    return prompt


@dataclass(frozen=True, slots=True)
class ToldMessages:
    """The messages of a chat as its template reads them, which say so many bytes."""

    messages: list[dict[str, Any]]
    size: int

    @classmethod
    def of(cls, chat: ChatFields) -> ToldMessages:
        """Takes a while for thousands. Raises `ApiError` as `template_messages`."""
        messages = template_messages(chat.messages)
        sizes = (*map(_text_bytes, messages), *map(_call_bytes, chat.messages))
        return cls(messages, sum(sizes))


@dataclass(frozen=True, slots=True)
class TextReader:
    """Tokenises the texts of one client, for as long as ``receive`` tells that the client is there;
    for a model of so many tokens of ``context``.

    Every method raises `ApiError`: 400 for more text than is tokenised for such a model, 503 where
    too much waits.
    """

    tokenizer: ModelTokenizer
    context: int
    receive: Receive

    async def prompts(
        self, prompts: Sequence[RawPrompt], add_special_tokens: bool, field: str = "prompt"
    ) -> list[Prompt]:
        """Those of a ``field`` of the request, a few at a time, so that others need not wait for
        all of them."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [Prompt(tuple(each), None) for each in prompts if not isinstance(each, str)]
        tokenizer = self.tokenizer
        sizes = list(map(text_bytes, texts))
        check_texts(sizes, field, self.context)
        normalized: list[int] = []

        def encode(piece: list[str]) -> list[Prompt]:
            normalized.extend(map(tokenizer.normalized_bytes, piece))
            check_texts(normalized, field, self.context)
            return [
                Prompt(tuple(tokenizer.encode(each, add_special_tokens)), each) for each in piece
            ]

        encoded: list[Prompt] = []
        while len(encoded) < len(texts):
            begin = end = len(encoded)
            size = 0
            while end < len(texts) and size < PIECE_BYTES:
                size += sizes[end]
                end += 1
            encoded += await self._run(size, partial(encode, texts[begin:end]))
        return encoded

    async def conversation(
        self, body: ChatFields, told: ToldMessages, add_special_tokens: bool
    ) -> Prompt:
        """Renders the template of what is ``told`` of a body, and tokenises what it wrote.

        Raises:
            ApiError: 400 for contradicting flags, too, or what the template refuses.
        """
        continuing = bool(body.continue_final_message)
        if continuing and body.add_generation_prompt:
            raise bad_request(
                "'continue_final_message' and 'add_generation_prompt' exclude each other",
                "continue_final_message",
            )
        prompting = body.add_generation_prompt
        prompting = not continuing if prompting is None else prompting
        tokenizer, variables = self.tokenizer, body.chat_template_kwargs or {}
        if body.reasoning_effort is not None:
            if not tokenizer.reads("reasoning_effort", tools=bool(body.tools)):
                raise not_implemented("reasoning_effort")
            effort = "xhigh" if body.reasoning_effort == "max" else body.reasoning_effort
            variables = {"reasoning_effort": effort, **variables}  # templates know no `max`
        tools = [tool.for_template() for tool in body.offered()]
        check_texts([told.size], "messages", self.context)
        tools_size = json_bytes(tools, "tools")
        check_texts([tools_size], "tools", self.context)

        def encode() -> Prompt:
            text = tokenizer.render_chat(
                told.messages, prompting, continuing, variables, tools or None
            )
            # More than the messages: templates may repeat what they are told.
            check_texts([tokenizer.normalized_bytes(text)], "messages", self.context)
            return Prompt(tuple(tokenizer.encode(text, add_special_tokens)), text)

        others = tools_size + _variable_bytes(variables) + len(told.messages) * BYTES_PER_MESSAGE
        return await self._run(told.size + others, encode)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of each word, at the beginning of a text and after a space, as vLLM
        has it; of white space as it is. Where a tokenizer begins every text with a space, those
        without it, too."""
        if not words:
            return ()
        tokenizer = self.tokenizer

        def encode() -> tuple[tuple[int, ...], ...]:
            encoded = partial(tokenizer.encode, add_special_tokens=False)
            anchor = encoded(_ANCHOR)
            said = b"".join(map(tokenizer.token_bytes.__getitem__, anchor))
            sequences: set[tuple[int, ...]] = set()
            for text in chain.from_iterable(map(_spellings, words)):
                sequences.add(tuple(encoded(text)))
                behind = encoded(_ANCHOR + text) if said != _ANCHOR.encode() else []
                if behind[: len(anchor)] == anchor:
                    sequences.add(tuple(behind[len(anchor) :]))
            return tuple(sorted(sequences - {()}))

        return await self._run(sum(BYTES_PER_WORD + 2 * text_bytes(word) for word in words), encode)

    async def _run(self, size: int, work: Callable[[], Returned]) -> Returned:
        return await self.tokenizer.workers.run(size, work, self.receive)


def _spellings(word: str) -> tuple[str, ...]:
    """How a bad word may stand in a text."""
    if not word.strip():
        return (word,)
    bare = word.removeprefix(" ")
    return bare, f" {bare}"


def _text_bytes(message: dict[str, Any]) -> int:
    return sum(text_bytes(text) for text in message.values() if isinstance(text, str))


def _call_bytes(message: Message) -> int:
    """Of the calls of a message, whose arguments are still text."""
    calls = message.get("tool_calls") or ()
    return sum(text_bytes(str(text)) for call in calls for text in call[call["type"]].values())


def json_bytes(value: Any, field: str) -> int:
    """The size of a value as JSON.

    Raises:
        ApiError: 400 naming ``field`` for one that is nested too deeply.
    """
    try:
        return len(orjson.dumps(value))
    except TypeError as error:  # it came as JSON
        raise bad_request(f"'{field}' is nested too deeply", field) from error


def _variable_bytes(variables: dict[str, Any]) -> int:
    """Raises:
    ApiError: 400 for more than a template should be told.
    """
    field = "chat_template_kwargs"
    size = json_bytes(variables, field)
    if size > MAX_TEMPLATE_KWARGS_BYTES:
        raise bad_request(
            f"'{field}' holds {size} bytes of JSON, more than {MAX_TEMPLATE_KWARGS_BYTES}", field
        )
    return size
