"""How the replies to one chat are held to what it asks for, and read."""

from __future__ import annotations

from collections.abc import Mapping

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.structured.applying import checked
from lexshard.serve_app.structured.constraint import Constraint
from lexshard.serve_app.tools.families import ReplyFormat
from lexshard.serve_app.tools.grammar import Beginning, reply_grammar, tool_grammar
from lexshard.serve_app.tools.offer import Offer, OfferedTool
from lexshard.serve_app.tools.reply_parser import ReplyParser


class ReplyPlan:
    """Of the replies to one chat with a model of ``format``, to which ``offer`` is made, None for
    no tools. ``free``: the request asks for what no grammar allows, as that a reply does not end;
    then calls that nothing insists on are not held to any."""

    def __init__(self, format: ReplyFormat, offer: Offer | None, free: bool) -> None:
        self._format = format
        self._offer = offer
        self._free = free
        self._loose = False
        self._beginning: Beginning = "free"
        self._answer: Constraint | None = None
        self._callable: Mapping[str, OfferedTool] = {} if offer is None else offer.callable

    @property
    def reads(self) -> bool:
        """Whether there is more in a reply than its text."""
        return self._offer is not None or self._format.reasoning is not None

    def note_prompt(self, prompt: str, continued: str | None) -> None:
        """Tells what the replies follow: a prompt, and the text that it ends in, where they go on
        with that."""
        marks = self._format.reasoning
        if marks is None:
            return
        end = prompt.rstrip()
        if continued is not None:
            begun = continued.rfind(marks.opening) > continued.rfind(marks.closing)
            self._beginning = "thinking" if begun else "thought"
        elif end.endswith(marks.opening):
            self._beginning = "thinking"
        elif end.endswith(marks.closing):
            self._beginning = "thought"

    def parser(self) -> ReplyParser:
        """One for each reply."""
        thinking = self._beginning == "thinking"
        return ReplyParser(
            self._format, self._callable, thinking, thinks=self._beginning != "thought"
        )

    def around(self, answer: Constraint | None) -> Constraint | None:
        """What whole replies must match where their answer must match ``answer``."""
        self._answer = answer
        offer = self._offer
        if offer is None and (answer is None or not self.reads):
            return answer
        if offer is not None and answer is None and self._free and not _insists(offer):
            return None
        grammar = None if answer is None else answer.grammar
        text = reply_grammar(self._format, self._beginning, offer, grammar, self._loose)
        assert text is not None  # there is something to match
        schemas = [tool.parameters for tool in self._callable.values()]
        if answer is not None:
            schemas += answer.schemas
        field = "tools" if answer is None or offer is not None else answer.field
        return Constraint(grammar or {}, field, tuple(schemas), whole=text)

    def loosen(self) -> bool:
        """Whether replies may be held to less, and from now on are: to the arguments of strict
        functions alone, then to nothing."""
        if self._offer is None or (self._loose and (self._free or _insists(self._offer))):
            return False
        self._free, self._loose = self._free or self._loose, True
        return True

    async def blame(self, call: HttpCall) -> None:
        """Finds out which tool it is, or whether it is the answer, that replies cannot be held to.
        It may be none of them, but all together.

        Raises:
            ApiError: 400 naming its field.
        """
        if self._answer is not None:
            await checked(call, self._answer)
        for tool in self._callable.values():
            field = f"{tool.place}.{'format' if tool.custom else 'parameters'}"
            text = tool_grammar(self._format, tool)
            await checked(call, Constraint({}, field, (tool.parameters,), whole=text))


def _insists(offer: Offer) -> bool:
    """Whether a call must be held to something."""
    return offer.required or any(tool.strict for tool in offer.callable.values())
