"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``: the fields of the body
here, blocks and tools in `lexshard.serve_app.messages_api.blocks`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from lexshard.serve_app.openai.protocol import (
    HELLO,
    MAX_MESSAGES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    AtLeastOne,
    NotImplementedField,
    RequestName,
    SeedNumber,
    StrictModel,
    shown_as,
)
from lexshard.serve_app.tools.definitions import MAX_TOOLS

# What Claude Code says of a context that is to stay as it is.
KEEPS_ALL: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)
SYSTEM_SCHEMA: Final = {
    "anyOf": [
        {"type": ["string", "null"]},
        {"type": "array", "maxItems": MAX_MESSAGES, "items": {"type": "object"}},
    ]
}


class ThinkingOptions(StrictModel):
    """``budget_tokens`` is of ``enabled``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: AtLeastOne | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessagesToolChoice(StrictModel):
    """``name`` is of ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(StrictModel):
    """``format`` is read in ``blocks.py``, where other JSON schemas are."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class PromptFields(StrictModel):
    """What becomes the prompt. ``messages`` and ``system`` are read in ``translation.py``, tools in
    ``blocks.py``."""

    model: str | None = None
    messages: Annotated[
        list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Annotated[Any, WithJsonSchema(SYSTEM_SCHEMA)] = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    # Accepted because clients send them; they change nothing here.
    cache_control: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None

    context_management: Annotated[Any, NotImplementedField(*KEEPS_ALL)] = None
    mcp_servers: Annotated[Any, NotImplementedField([])] = None


class CountTokensRequest(PromptFields):
    """``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"messages": HELLO}))


class MessagesRequest(PromptFields):
    """``POST /v1/messages``."""

    model_config = ConfigDict(json_schema_extra=shown_as({"messages": HELLO, "max_tokens": 60}))

    max_tokens: AtLeastOne
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
            Field(fail_fast=True, max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: SeedNumber | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: RequestName | None = None

    # Accepted because clients send them; they change nothing here.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None

    container: Annotated[Any, NotImplementedField()] = None
