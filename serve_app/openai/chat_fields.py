"""The bodies of chats, field by field: messages, and the tools they may call.

As of all bodies (`protocol`), what is unknown is refused by name, null asks for nothing, and what a
body costs is bounded while it is understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Required

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    with_config,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from lexshard.serve_app.known_fields import known_fields
from lexshard.serve_app.openai.errors import bad_request, shortened
from lexshard.serve_app.openai.protocol import (
    HELLO,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    NOT_IMPLEMENTED,
    AtLeastOne,
    GenerationFields,
    Ignored,
    NotImplementedField,
    StrictModel,
    TokenizeFields,
    read_object,
    shown_as,
)
from lexshard.serve_app.tools.offer import (
    INPUT,
    MAX_TOOLS,
    OfferedTool,
    ToolChoice,
    ToolDefinition,
    offered_tools,
)

# Of one message.
MAX_CALLS = 1024
CALL_TYPES = ("function", "custom")
# What was thought, under vLLM's name and its older one.
THOUGHTS = ("reasoning", "reasoning_content")
STRICT: ConfigDict = ConfigDict(extra="forbid", strict=True)


class RefusalPart(StrictModel):
    type: Literal["refusal"]
    refusal: str


class TextPart(StrictModel):
    type: Literal["text"]
    text: str
    # Prefixes are cached always.
    prompt_cache_breakpoint: Ignored = None
    cache_control: Ignored = None


def _check_part(part: Any) -> Any:
    """What was refused is a text, too."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {**part, "type": "text", "text": part.get("refusal"), "refusal": None}
    if not isinstance(part, dict) or part.get("type") != "text":
        raise PydanticCustomError("part", "must be of type 'text': this model reads text only")
    return part


_PART = BeforeValidator(_check_part, json_schema_input_type=TextPart | RefusalPart)
TextParts = Annotated[list[Annotated[TextPart, _PART]], Field(fail_fast=True, min_length=1)]


def _text_or_parts(content: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Text as it is, parts as their models."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    return read(content)


@with_config(STRICT)
class FunctionCall(TypedDict):
    """``arguments`` are a JSON object, as text."""

    name: str
    arguments: str


@with_config(STRICT)
class CustomCall(TypedDict):
    name: str
    input: str


def _check_call(call: Any) -> Any:
    """A call without what is null; of the type that it has, with its part alone."""
    if not isinstance(call, dict):
        raise PydanticCustomError("dict_type", "must be an object")
    call = {name: value for name, value in call.items() if value is not None and name != "index"}
    parts = [name for name in CALL_TYPES if name in call]
    if parts != [call.setdefault("type", "function")]:
        raise PydanticCustomError(
            "call", "must have 'function' or 'custom', and name it as its 'type'"
        )
    return call


@with_config(STRICT)
class MessageCall(TypedDict, total=False):
    id: Required[Annotated[str, Field(min_length=1)]]
    type: Required[Literal["function", "custom"]]
    function: FunctionCall
    custom: CustomCall


def _check_message(message: Any) -> Any:
    """Refuses what `Message` has not, and what belongs to messages of another role."""
    if not isinstance(message, dict):
        raise PydanticCustomError("dict_type", "must be an object")
    role = message.get("role")
    if role == "function" or message.get("function_call"):
        field = "role" if role == "function" else "function_call"
        raise PydanticCustomError(NOT_IMPLEMENTED, "not implemented", {"field": field})
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if message.get(name) and role != owner:
            told = f"belongs to messages of the role '{owner}'"
            raise PydanticCustomError("owner", told, {"field": name})
    if role == "tool" and not message.get("tool_call_id"):
        raise PydanticCustomError("missing", "is required", {"field": "tool_call_id"})
    silent = message.get("content") in (None, [])
    if silent and any(map(message.get, ("tool_calls", *THOUGHTS))):
        # Clients send back what they got: a reply that only calls tools has no text.
        message = {**message, "content": ""}
    return known_fields(message, Message.__annotations__)


@with_config(STRICT)
class Message(TypedDict, total=False):
    """A dictionary of strings, which costs a collection of garbage nothing: models of 16,000
    messages held other requests up for half a second."""

    role: Required[Literal["system", "developer", "user", "assistant", "tool"]]
    content: Required[
        Annotated[TextParts, WrapValidator(_text_or_parts, json_schema_input_type=str | TextParts)]
    ]
    name: str | None
    tool_calls: (
        Annotated[
            list[
                Annotated[
                    MessageCall, BeforeValidator(_check_call, json_schema_input_type=MessageCall)
                ]
            ],
            Field(fail_fast=True, max_length=MAX_CALLS),
        ]
        | None
    )
    tool_call_id: str | None
    reasoning: str | None
    reasoning_content: str | None

    # Of OpenAI's own reply messages, which clients send back unchanged.
    refusal: Annotated[Any, NotImplementedField([])]
    annotations: Annotated[Any, NotImplementedField([])]
    audio: Annotated[Any, NotImplementedField([])]
    function_call: Annotated[Any, NotImplementedField([])]


def text_of(message: Message) -> str:
    """Its text, or that of its parts, a line each."""
    content: str | list[TextPart] = message["content"]
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What chat templates read. Arguments of calls are objects there.

    Raises:
        ApiError: 400 for arguments that are no object, or a result of no call before it.
    """
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    told = []
    for i, message in enumerate(messages):
        plain: dict[str, Any] = {"role": str(message["role"]), "content": text_of(message)}
        name = message.get("name")
        if name is not None:
            plain["name"] = name
        thought = next(filter(None, (message.get(field) for field in THOUGHTS)), None)
        if thought is not None:
            plain |= dict.fromkeys(THOUGHTS, thought)
        calls = message.get("tool_calls")
        if calls:
            plain["tool_calls"] = [
                _template_call(call, f"messages.{i}.tool_calls.{j}") for j, call in enumerate(calls)
            ]
            names |= {call["id"]: call["function"]["name"] for call in plain["tool_calls"]}
        call_id = message.get("tool_call_id")
        if call_id:
            if call_id not in names:
                raise bad_request(
                    f"'{shortened(call_id)}' is the id of no tool call in a message before",
                    f"messages.{i}.tool_call_id",
                )
            plain = {**plain, "tool_call_id": call_id, "name": name or names[call_id]}
        told.append(plain)
    return told


def _template_call(call: MessageCall, place: str) -> dict[str, Any]:
    if "custom" in call:
        function: dict[str, Any] = {
            "name": call["custom"]["name"],
            "arguments": {INPUT: call["custom"]["input"]},
        }
    else:
        written = call["function"]["arguments"]
        arguments = read_object(written, f"{place}.function.arguments") if written.strip() else {}
        function = {"name": call["function"]["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _count_messages(messages: Any) -> Any:
    """Bounds a conversation before its messages are looked at."""
    if isinstance(messages, list):
        dictionaries = [each for each in messages if isinstance(each, dict)]
        lists = (each.get(name) for each in dictionaries for name in ("content", "tool_calls"))
        parts = sum(len(each) for each in lists if isinstance(each, list))
        if len(messages) + parts > MAX_MESSAGES:
            raise PydanticCustomError(
                "too_long",
                f"holds {len(messages)} messages and {parts} parts of messages, together more "
                f"than {MAX_MESSAGES}",
            )
    return messages


class ChatFields(StrictModel):
    """A conversation, the tools it is told of, and how it becomes a prompt."""

    messages: Annotated[
        list[Annotated[Message, BeforeValidator(_check_message, json_schema_input_type=Message)]],
        Field(fail_fast=True, min_length=1, json_schema_extra={"maxItems": MAX_MESSAGES}),
        BeforeValidator(_count_messages),
    ]
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def offered(self) -> tuple[OfferedTool, ...]:
        """Raises:
        ApiError: 400 as `offered_tools`.
        """
        return offered_tools(self.tools)


class ChatCompletionRequest(ChatFields, GenerationFields):
    """``POST /v1/chat/completions``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"messages": HELLO, "max_tokens": 60}))

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    functions: Annotated[Any, NotImplementedField([])] = None
    function_call: Annotated[Any, NotImplementedField("none", "auto")] = None
    audio: Annotated[Any, NotImplementedField()] = None
    modalities: Annotated[Any, NotImplementedField(["text"])] = None
    prediction: Annotated[Any, NotImplementedField()] = None
    web_search_options: Annotated[Any, NotImplementedField()] = None


class TokenizeChatRequest(ChatFields, TokenizeFields):
    """``POST /tokenize`` with a conversation."""

    model_config = ConfigDict(json_schema_extra=shown_as({"messages": HELLO}))
