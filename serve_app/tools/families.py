"""How families of models write reasoning and calls of tools: as data, found for a model by its
tokenizer's own description of replies, else by the marks in its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# How what stands inside the marks of a call is written:
#   object  {"name": "f", "arguments": {...}}
#   list    the same in a JSON array, all calls of a reply together
#   named   f, a mark, {...}
#   xml     <function=f> with a <parameter=k> for each argument
CallBody = Literal["object", "list", "named", "xml"]


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How calls are written. A model is of the first family all of whose ``signs`` its chat
    template holds.

    ``opening`` and ``closing`` are the marks around a call; without a closing mark it ends with its
    body. ``padding`` stands between the marks and the body, ``between`` between two calls,
    ``infix`` (of the body ``named``) between name and arguments. Name and arguments are under
    ``name_key`` and ``arguments_key`` of an object. ``bare``: a reply that begins with
    the body is a call, also without the opening mark, and there are no calls after text.
    ``call_id_length`` is how long ids of calls are where templates insist on it, 0: any.
    """

    name: str
    signs: tuple[str, ...]
    body: CallBody
    opening: str = ""
    closing: str = ""
    padding: str = ""
    between: str = ""
    infix: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    bare: bool = False
    call_id_length: int = 0

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.opening, self.closing, self.infix) if mark)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands before and after what a model thinks, at the beginning of its reply."""

    opening: str
    closing: str


FAMILIES = (
    ToolFamily(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        "xml",
        opening="<tool_call>",
        closing="</tool_call>",
        padding="\n",
        between="\n",
    ),
    ToolFamily(
        "hermes",
        ("<tool_call>",),
        "object",
        opening="<tool_call>",
        closing="</tool_call>",
        padding="\n",
        between="\n",
    ),
    ToolFamily(
        "mistral-named",
        ("[TOOL_CALLS]", "[ARGS]"),
        "named",
        opening="[TOOL_CALLS]",
        infix="[ARGS]",
        call_id_length=9,
    ),
    ToolFamily(
        "mistral", ("[TOOL_CALLS]",), "list", opening="[TOOL_CALLS]", between=", ", call_id_length=9
    ),
    ToolFamily(
        "llama3",
        ("<|start_header_id|>", "parameters"),
        "object",
        opening="<|python_tag|>",
        between="; ",
        arguments_key="parameters",
        bare=True,
    ),
    # Of a template that reads tools and has none of these marks: what it asks for is most often
    # JSON, as what follows the opening mark of most of them is.
    ToolFamily("json", (), "list", between=", ", bare=True),
)
FAMILIES_BY_NAME: Mapping[str, ToolFamily] = {family.name: family for family in FAMILIES}
REASONING = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How one model writes replies. ``tools`` is None where its template reads none, ``reasoning``
    where it marks no reasoning. ``token_ids``: those of the marks that are one token."""

    tools: ToolFamily | None
    reasoning: ReasoningMarks | None
    token_ids: Mapping[str, int]

    @property
    def marks(self) -> tuple[str, ...]:
        tools = self.tools.marks if self.tools else ()
        reasoning = (self.reasoning.opening, self.reasoning.closing) if self.reasoning else ()
        return (*reasoning, *tools)


def reply_format(
    template: str,
    reads_tools: bool,
    described: Any,
    added_tokens: Mapping[str, int],
    forced: str | None = None,
) -> ReplyFormat:
    """The format of the model with such a chat template.

    ``described`` is its tokenizer's ``response_template`` (of transformers), which goes before what
    the template's marks tell as far as it is understood. ``forced`` names the family instead.
    """
    fields = _described_fields(described)
    tools = None
    if forced is not None:
        tools = FAMILIES_BY_NAME[forced]
    elif reads_tools:
        found = next(each for each in FAMILIES if all(sign in template for sign in each.signs))
        tools = _described_tools(fields.get("tool_calls")) or found
    thoughts = (_described_reasoning(fields.get(name)) for name in _THOUGHTS)
    known = (marks for marks in REASONING if marks.closing in template)
    reasoning = next(filter(None, (*thoughts, *known)), None)
    format = ReplyFormat(tools, reasoning, {})
    return replace(
        format,
        token_ids={mark: added_tokens[mark] for mark in format.marks if mark in added_tokens},
    )


# Under which of these names a description has what a model thinks.
_THOUGHTS = ("reasoning", "reasoning_content", "thinking")


def _described_fields(described: Any) -> dict[str, Any]:
    """What a description says of the parts of a reply; nothing where the answer itself stands
    between marks, which is a kind of reply that is not read here."""
    fields = described.get("fields") if isinstance(described, dict) else None
    if not isinstance(fields, dict):
        return {}
    content = fields.get("content")
    marked = isinstance(content, dict) and {"open", "open_pattern"} & content.keys()
    return {} if marked else fields


def _described_reasoning(field: Any) -> ReasoningMarks | None:
    opening, closing = _literal(field, "open"), _literal(field, "close")
    return ReasoningMarks(opening, closing) if opening and closing else None


def _described_tools(field: Any) -> ToolFamily | None:
    """Calls between literal marks that are JSON, or Qwen's XML."""
    opening, closing = _literal(field, "open"), _literal(field, "close")
    if opening and field.get("content") == "json" and not field.get("content_args"):
        keys = _described_keys(field.get("transform"))
        family = ToolFamily("described", (), "object", opening, closing, "\n", "\n", "", *keys)
        if field.get("transform_each"):
            return replace(family, body="list", padding="", between=", ")
        return family
    if isinstance(field, dict) and "<parameter=" in str(field.get("content_args")):
        return FAMILIES_BY_NAME["qwen3-coder"]
    return None


def _described_keys(transform: Any) -> tuple[str, str]:
    """Under which keys of an object the name and the arguments are, by what is made of it."""
    function = transform.get("function") if isinstance(transform, dict) else None
    told = function if isinstance(function, dict) else {}
    name_key, arguments_key = (
        str(told.get(part, part)).strip("{}").rpartition(".")[2] for part in ("name", "arguments")
    )
    return name_key, arguments_key


def _literal(field: Any, key: str) -> str:
    """A mark of a described field, where it is plain text."""
    mark = field.get(key) if isinstance(field, dict) else None
    return mark.strip() if isinstance(mark, str) else ""
