"""One grammar for a whole reply: what it thinks, says, calls and answers, as llguidance reads it.

A mark that is one token of the model's is that token; where it is spelled, the text before it ends
with the first one. So thinking is free until its closing mark, and text until a call begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import orjson

from lexshard.serve_app.structured.schemas import OPTIONS
from lexshard.serve_app.tools.argument_grammar import ArgumentGrammars, quoted
from lexshard.serve_app.tools.families import ReplyFormat, ToolFamily
from lexshard.serve_app.tools.offer import Offer, OfferedTool

# Where a reply begins: before what the model may think, amid it, or after it.
Beginning = Literal["free", "thinking", "thought"]
_ANY = "ANY: /(?s:.*)/"
# Between what was thought and what must follow.
_GAP = r"GAP: /\n{1,4}/"


def reply_grammar(
    format: ReplyFormat,
    beginning: Beginning,
    offer: Offer | None,
    answer: Mapping[str, Any] | None,
    loose: bool = False,
) -> str | None:
    """The grammar of a reply that may call what is on ``offer``, None for nothing, and whose answer
    must match ``answer``, a grammar object of llguidance, None for any. None where any reply will
    do. ``loose``: arguments of functions that are not strict are any object.
    """
    if offer is None and answer is None:
        return None
    return _ReplyGrammar(format, loose).text(beginning, offer, answer)


class _ReplyGrammar:
    def __init__(self, format: ReplyFormat, loose: bool) -> None:
        self._format = format
        self._lines: list[str] = []
        self._arguments = ArgumentGrammars(loose)

    def text(
        self, beginning: Beginning, offer: Offer | None, answer: Mapping[str, Any] | None
    ) -> str:
        thinks = self._thinking(beginning)
        if offer is None or self._format.tools is None:
            body = "@answer"
        else:
            body = self._calls(self._format.tools, offer)
            if not offer.required:
                body = self._or_calls(self._format.tools, offer, answer)
        optional = {"free": "think?", "thinking": "think", "thought": ""}[beginning]
        lines = [
            "%llguidance {}",
            f"start: {optional if thinks else ''} {body}",
            _ANY,
            _GAP,
            *self._lines,
            *self._arguments.lines,
        ]
        grammars: list[Mapping[str, Any]] = [{"name": "reply", "lark_grammar": "\n".join(lines)}]
        if answer is not None and "@answer" in body:
            grammars.append({**answer, "name": "answer"})
        return orjson.dumps({"grammars": [*grammars, *self._arguments.grammars]}).decode()

    def _mark(self, mark: str) -> str:
        token = self._format.token_ids.get(mark)
        return quoted(mark) if token is None else f"<[{token}]>"

    def _is_token(self, mark: str) -> bool:
        return mark in self._format.token_ids

    def _thinking(self, beginning: Beginning) -> bool:
        """Whether the reply may think."""
        marks = self._format.reasoning
        if marks is None or beginning == "thought":
            return False
        opening = self._mark(marks.opening) if beginning == "free" else ""
        self._lines.append(f"think: {opening} thinking GAP?")
        if self._is_token(marks.closing):
            self._lines.append(f"thinking: ANY {self._mark(marks.closing)}")
        else:
            self._lines.append(f"thinking[lazy]: ANY {quoted(marks.closing)}")
        return True

    def _calls(self, family: ToolFamily, offer: Offer) -> str:
        """A reply that calls at once."""
        arguments = self._arguments
        one = " | ".join(arguments.call(family, tool, self._mark) for tool in _values(offer))
        padding = quoted(family.padding) if family.padding else ""
        closing = self._mark(family.closing) if family.closing else ""
        between = quoted(family.between) if family.between else ""
        several = "" if offer.single else f"({between} one)*"
        self._lines.append(f"one: {one}")
        if family.body == "list" and family.bare:
            # A text could begin with the bracket, too, and would: its terminal is the longer one.
            first = " | ".join(
                arguments.call(family, tool, self._mark, "[") for tool in _values(offer)
            )
            self._lines.append(f"first: {first}")
            inside = f'first {several} "]"'
        elif family.body == "list":
            inside = f'"[" one {several} "]" {closing}'
        elif family.bare:
            inside = f"one {several} {closing}"
        else:
            inside = f"{padding} one {padding} {closing}"
        self._lines.append(f"inside: {inside}")
        if family.bare:
            opened = self._mark(family.opening) if self._is_token(family.opening) else ""
            self._lines.append(f"calls: {opened}{'?' if opened else ''} inside")
            return "calls"
        opened = self._mark(family.opening)
        repeated = family.body != "list" and not offer.single
        again = f"({between} {opened} inside)*" if repeated else ""
        self._lines.append(f"calls: {opened} inside {again}")
        return "calls"

    def _or_calls(self, family: ToolFamily, offer: Offer, answer: Mapping[str, Any] | None) -> str:
        """A reply that may call: else it is ``answer``, or without one a text, in which calls may
        be."""
        if answer is not None and family.bare and "json_schema" in answer:
            # Both begin as JSON does, and can be told apart only where both are JSON.
            options = answer["json_schema"].get(OPTIONS, {})
            calls = (self._arguments.json_call(family, each, options) for each in _values(offer))
            return f"(@answer | {' | '.join(calls)})"
        if answer is not None:
            return "(@answer | calls)"
        # No text begins as if it were thought: it would be read so.
        marks = self._format.reasoning
        first = f"~(/\\s*/ {quoted(marks.opening)} ANY)" if marks else ""
        if family.bare:
            keys = "|".join(sorted({family.name_key, "arguments", "parameters"}))
            called = rf'/\s*(\[\s*)?\{{\s*"({keys})"\s*:/'
            opened = f"(/\\s*/ {quoted(family.opening)})? " if family.opening else ""
            # Line ends after what was thought are none of a text's, as they are none of a call's.
            excluded = [f"~({opened}{called} ANY)", *([first, '~("\\n" ANY)'] if first else [])]
            self._lines.append(f"TEXT: {' & '.join(['ANY', *excluded])}")
            return "(TEXT | calls)"
        opening = family.opening
        if self._is_token(opening):
            spelled = f"~(ANY {quoted(opening)} ANY)"
            self._lines.append(f"REST: ANY & {spelled}")
            self._lines.append(f"FIRST: {' & '.join(['REST', *([first] if first else [])])}")
            mark = self._mark(opening)
            again = "" if offer.single or family.body == "list" else f"(REST {mark} inside)* REST"
            return f"(FIRST | FIRST {mark} inside {again})"
        self._lines.append(f"FIRST: {' & '.join(['ANY', *([first] if first else [])])}")
        self._lines.append(f"head[lazy]: FIRST {quoted(opening)}")
        self._lines.append(f"more[lazy]: ANY {quoted(opening)}")
        again = "" if offer.single or family.body == "list" else "(more inside)* ANY"
        return f"(FIRST | head inside {again})"


def _values(offer: Offer) -> Iterable[OfferedTool]:
    return offer.callable.values()


def tool_grammar(format: ReplyFormat, tool: OfferedTool) -> str:
    """The grammar of nothing but a call, which tells whether a tool can be held to."""
    text = reply_grammar(format, "thought", Offer({tool.name: tool}, True, True), None)
    assert text is not None  # there is a tool
    return text
