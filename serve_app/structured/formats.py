"""Formats of a structural tag, which hold each other: from what a request says to one Lark grammar.

As xgrammar describes them, for vLLM: texts, JSON, regular expressions and grammars; sequences,
alternatives and repetitions of these; tags around them, and free text in which tags are begun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lexshard.serve_app.known_fields import known_fields

Name = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Name], Field(fail_fast=True, max_length=64)]
Several = Annotated[list["Format"], Field(fail_fast=True, min_length=1)]


class ConstraintPart(BaseModel):
    """An object of a request, of which null asks for nothing, whatever its name."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, body: Any) -> Any:
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        return known_fields(body, fields) if isinstance(body, dict) else body


class ConstString(ConstraintPart):
    """A text."""

    type: Literal["const_string"]
    value: str


class JsonPart(ConstraintPart):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class RegexPart(ConstraintPart):
    """A text that a regular expression matches."""

    type: Literal["regex"]
    pattern: str


class GrammarPart(ConstraintPart):
    """What a grammar, Lark or GBNF, allows."""

    type: Literal["grammar"]
    grammar: str


class AnyText(ConstraintPart):
    """Any text without these."""

    type: Literal["any_text"]
    excludes: Names = []
    max_chars: Annotated[int | None, Field(ge=0, le=100_000)] = None


class Sequenced(ConstraintPart):
    """One after the other."""

    type: Literal["sequence"]
    elements: Several


class Alternatives(ConstraintPart):
    """One of several."""

    type: Literal["or"]
    elements: Several


class Repeated(ConstraintPart):
    """Once or not at all, at least once, or any number of times."""

    type: Literal["optional", "plus", "star"]
    content: Format


class Counted(ConstraintPart):
    """``min`` to ``max`` times; -1: any number from ``min`` on."""

    type: Literal["repeat"]
    min: Annotated[int, Field(ge=0, le=10_000)]
    max: Annotated[int, Field(ge=-1, le=10_000)]
    content: Format


class Tag(ConstraintPart):
    """What stands between two texts; any of several may end it."""

    type: Literal["tag"] = "tag"
    begin: Name
    content: Format
    end: str | Annotated[list[str], Field(min_length=1)]


Tags = Annotated[list[Tag], Field(fail_fast=True, min_length=1)]


class TriggeredTags(ConstraintPart):
    """Free text, in which each trigger begins one of the tags."""

    type: Literal["triggered_tags"]
    triggers: Annotated[list[Name], Field(fail_fast=True, min_length=1)]
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Names = []


class SeparatedTags(ConstraintPart):
    """Tags and nothing else, with a separator between two of them."""

    type: Literal["tags_with_separator"]
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | JsonPart
    | RegexPart
    | GrammarPart
    | AnyText
    | Sequenced
    | Alternatives
    | Repeated
    | Counted
    | Tag
    | TriggeredTags
    | SeparatedTags,
    Field(discriminator="type"),
]


_IS_TOKEN = re.compile(r"<[^<>\s]+>")


class FormatError(ValueError):
    """What no grammar holds; why."""


class FormatGrammar:
    """Collects rules of one grammar. ``json_of`` makes the grammar of a schema, ``lark_of`` Lark of
    a grammar that may be GBNF, ``regex_of`` Lark's spelling of a regular expression. A text that is
    one of the model's ``special_tokens`` is that token: no text spells it.
    """

    def __init__(
        self,
        json_of: Callable[[dict[str, Any]], dict[str, Any]],
        lark_of: Callable[[str], str],
        regex_of: Callable[[str], str],
        special_tokens: Collection[str] = (),
    ) -> None:
        self._json_of = json_of
        self._lark_of = lark_of
        self._regex_of = regex_of
        # As Lark writes tokens.
        self._special = {each for each in special_tokens if _IS_TOKEN.fullmatch(each)}
        self._rules: list[str] = []
        self.schemas: list[dict[str, Any]] = []

    def text(self, whole: Format) -> str:
        """The grammar of a reply that is all of it. Raises FormatError."""
        start = self._of(whole, ())
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _rule(self, content: str, name: str = "part", lazy: bool = False) -> str:
        place = f"{name}_{len(self._rules)}"
        self._rules.append(f"{place}{'[lazy]' if lazy else ''}: {content}")
        return place

    def _of(self, part: Format, ends: Sequence[str]) -> str:
        """An expression for ``part`` and one of the ``ends`` after it; none are asked for where
        that is empty."""
        if isinstance(part, AnyText):
            return self._any_text(part, ends)
        if isinstance(part, Sequenced):
            return self._sequence(part.elements, ends)
        if isinstance(part, TriggeredTags):
            return self._triggered(part, ends)
        if isinstance(part, Alternatives):
            return self._rule(" | ".join(self._of(each, ends) for each in part.elements))
        after = f" {self._one_of(ends)}" if any(ends) else ""
        return self._closed(part) + after

    def _closed(self, part: Format) -> str:
        """An expression for what ends by itself."""
        if _is_free(part):
            raise FormatError("free text must come last, or before a text that ends it")
        match part:
            case ConstString():
                return self._literal(part.value)
            case JsonPart():
                schema = part.json_schema if isinstance(part.json_schema, dict) else {}
                if part.json_schema is False:
                    raise FormatError("no JSON fits the schema 'false'")
                self.schemas.append(schema)
                return self._rule(f"%json {orjson.dumps(self._json_of(schema)).decode()}")
            case RegexPart():
                return self._rule(f"/{self._regex_of(part.pattern)}/")
            case GrammarPart():
                return self._rule(f"%lark {{\n{self._lark_of(part.grammar)}\n}}")
            case Repeated():
                sign = {"optional": "?", "plus": "+", "star": "*"}[part.type]
                return f"({self._closed(part.content)}){sign}"
            case Counted():
                if -1 < part.max < part.min:
                    raise FormatError(f"'repeat' from {part.min} to {part.max} times")
                most = "" if part.max == -1 else str(part.max)
                return f"({self._closed(part.content)}){{{part.min},{most}}}"
            case Tag():
                return self._tag(part, part.begin)
            case SeparatedTags():
                one = self._rule(" | ".join(self._closed(each) for each in part.tags))
                more = "" if part.stop_after_first else f" ({self._literal(part.separator)} {one})*"
                return self._rule(f"{one}{more}") + ("" if part.at_least_one else "?")
        return self._of(part, ())

    def _tag(self, tag: Tag, begin: str) -> str:
        """``begin`` is what is left of the tag's own."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        opening = self._literal(begin) if begin else ""
        return self._rule(f"{opening} {self._of(tag.content, ends)}")

    def _sequence(self, parts: Sequence[Format], ends: Sequence[str]) -> str:
        """Free text ends with the text that follows it: both are one rule."""
        made = []
        parts = list(parts)
        while parts:
            first = parts.pop(0)
            own: Sequence[str] = () if parts else ends
            if _is_free(first) and parts:
                follows = parts[0]
                if isinstance(follows, ConstString) and follows.value:
                    own = [follows.value]
                    parts.pop(0)
                    if not parts:
                        own = [follows.value + end for end in ends] or own
            made.append(self._of(first, own) if own or not parts else self._closed(first))
        return " ".join(made)

    def _any_text(self, part: AnyText, ends: Sequence[str]) -> str:
        most = "*" if part.max_chars is None else f"{{0,{part.max_chars}}}"
        text = self._terminal(part.excludes, most)
        if not any(ends):
            return text
        if part.excludes and part.max_chars is None and set(part.excludes) <= set(ends):
            text = self._terminal([], most)  # it ends with the first of them anyway
        return self._ended(text, ends)

    def _triggered(self, part: TriggeredTags, ends: Sequence[str]) -> str:
        text = self._terminal(part.excludes, "*")
        tags = []
        for tag in part.tags:
            trigger = next((each for each in part.triggers if tag.begin.startswith(each)), None)
            if trigger is None:
                raise FormatError(f"none of 'triggers' begins {tag.begin!r}")
            begun = self._ended(text, [trigger])
            tags.append(f"{begun} {self._tag(tag, tag.begin.removeprefix(trigger))}")
        one = self._rule(" | ".join(tags))
        last = self._ended(text, ends) if any(ends) else text
        if part.stop_after_first:
            closing = f" {self._one_of(ends)}" if any(ends) else ""
            only = self._rule(f"{one}{closing}")
            return only if part.at_least_one else self._rule(f"{only} | {last}")
        return f"{one}{'+' if part.at_least_one else '*'} {last}"

    def _ended(self, text: str, ends: Sequence[str]) -> str:
        """Free ``text`` up to the first of ``ends``. A token ends what is no token by itself."""
        spelled = [each for each in ends if each not in self._special]
        tokens = [each for each in ends if each in self._special]
        rules = [self._rule(f"{text} {self._one_of(spelled)}", lazy=True)] if spelled else []
        rules += [self._rule(f"{text} {each}") for each in tokens]
        return rules[0] if len(rules) == 1 else self._rule(" | ".join(rules))

    def _one_of(self, ends: Sequence[str]) -> str:
        options = " | ".join(map(self._literal, ends))
        return options if len(ends) == 1 else f"({options})"

    def _literal(self, text: str) -> str:
        return text if text in self._special else orjson.dumps(text).decode()

    def _terminal(self, excludes: Collection[str], most: str) -> str:
        content = f"/(?s:.){most}/"
        if excludes:
            content += f" & ~/(?s:.*)({'|'.join(map(_escaped, excludes))})(?s:.*)/"
        return self._rule(content, "TEXT")


def _is_free(part: Format) -> bool:
    """Whether it may end in text of any kind, and so never ends by itself."""
    match part:
        case AnyText() | TriggeredTags():
            return True
        case Sequenced():
            return _is_free(part.elements[-1])
        case Alternatives():
            return any(map(_is_free, part.elements))
        case Repeated() | Counted():
            return _is_free(part.content)
    return False


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    special = set(r"\.+*?()|[]{}^$#&-~/")
    return "".join(
        f"\\x{ord(each):02X}" if each in special or each < " " else each for each in text
    )
