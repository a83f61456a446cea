"""How the replies to one chat are held to what it asks for, and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lexshard.serve_app.http_call import HttpCall
from lexshard.serve_app.openai.errors import bad_request
from lexshard.serve_app.structured.applying import checked
from lexshard.serve_app.structured.constraint import Constraint, RefusedGrammarError, left_to_model
from lexshard.serve_app.structured.schemas import check_held, unheld_places
from lexshard.serve_app.tools.calls import unheld_apart
from lexshard.serve_app.tools.families import ReplyFormat
from lexshard.serve_app.tools.grammar import Beginning, calls_grammar, reply_grammar
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
        """What whole replies must match where their answer must match ``answer``.

        Raises:
            ApiError: 400 naming a strict tool that no grammar holds.
        """
        self._answer = answer
        offer = self._offer
        if offer is None and (answer is None or not self.reads):
            return answer
        if offer is not None and answer is None and self._free and not _insists(offer):
            return Constraint({}, "tools", notes=(left_to_model("how 'tools' are called"),))
        grammar = None if answer is None else answer.grammar
        text = reply_grammar(self._format, self._beginning, offer, grammar, self._loose)
        assert text is not None  # there is something to match
        schemas = [tool.parameters for tool in self._callable.values()]
        notes = self._notes()
        if answer is not None:
            schemas += answer.schemas
            notes += answer.notes
        field = "tools" if answer is None or offer is not None else answer.field
        return Constraint(grammar or {}, field, tuple(schemas), tuple(notes), text)

    def _notes(self) -> list[str]:
        """What the grammars of tools leave to the model and do not tell by themselves."""
        for tool in self._callable.values():
            if tool.strict and not tool.custom:
                check_held(self._unheld(tool), f"{tool.place}.parameters")
        others = [tool for tool in self._callable.values() if not tool.strict]
        if self._loose and others:
            return [left_to_model("what is in 'parameters' of tools without 'strict'")]
        return [left_to_model(each) for tool in others for each in self._unheld(tool)]

    def _unheld(self, tool: OfferedTool) -> Iterator[str]:
        yield from unheld_places(tool.parameters)
        if self._format.tools is not None and self._format.tools.body == "xml":
            yield from unheld_apart(tool.parameters)

    async def relax(self, call: HttpCall, error: RefusedGrammarError) -> None:
        """Holds replies to less from now on, after ``error`` of their grammar: to the arguments of
        strict functions alone, then to nothing.

        Raises:
            ApiError: 400 naming the tool, or the answer, that is at fault by itself; ``error``
                where they insist on what all of them together are too much for.
        """
        if not error.too_much or len(self._callable) == 1:
            await self._blame(call)
        if self._offer is None or (self._loose and (self._free or _insists(self._offer))):
            if error.parameter == "tools":
                told = "offer fewer or smaller tools, or allow fewer in 'tool_choice'"
                raise bad_request(f"{error.message}; {told}", "tools") from error
            raise error
        self._free, self._loose = self._free or self._loose, True

    async def _blame(self, call: HttpCall) -> None:
        """Finds out which tool it is, or whether it is the answer, that replies cannot be held to.
        It may be none of them, but all together. Of tools, halves are compiled, halves of these,
        and so on: what all cost together, once more. Where some are too much, no further.

        Raises:
            RefusedGrammarError: 400 naming its field.
        """
        if self._answer is not None:
            await checked(call, self._answer)
        tools = list(self._callable.values())
        fine, wrong = 0, len(tools)  # so many of the first can be held to, so many cannot
        while wrong - fine > 1:
            middle = (fine + wrong) // 2
            try:
                await self._check(call, tools[fine:middle])
                fine = middle
            except RefusedGrammarError as error:
                if error.too_much:
                    return
                wrong = middle
        if tools:
            await self._check(call, tools[fine:wrong])

    async def _check(self, call: HttpCall, tools: Sequence[OfferedTool]) -> None:
        """Raises:
        RefusedGrammarError: 400 naming the first of ``tools`` where they cannot be held to.
        """
        field = f"{tools[0].place}.{'format' if tools[0].custom else 'parameters'}"
        text = calls_grammar(self._format, tools, self._loose)
        schemas = tuple(tool.parameters for tool in tools)
        await checked(call, Constraint({}, field, schemas, whole=text))


def _insists(offer: Offer) -> bool:
    """Whether a call must be held to something."""
    return offer.required or any(tool.strict for tool in offer.callable.values())
