"""From what the choices of a request say to the bytes of its response: whole, or as events."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import orjson

from lexshard.actors.messages import TokenOrigin
from lexshard.serve_app.openai.choice import Choice, Delta, OutputOptions, WholeChoice
from lexshard.serve_app.openai.errors import ApiError, bad_request
from lexshard.serve_app.openai.logprobs import LogprobsFormatter
from lexshard.serve_app.openai.protocol import StreamOptions

DONE = b"data: [DONE]\n\n"
_PLACE = uuid.uuid4().hex  # of the text, while what stands around it is encoded


def server_sent_event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def receipt_of(delta: Delta) -> dict[str, Any] | None:
    """That of a choice which ends with ``delta``, where the client wants one."""
    choice, reason = delta.choice, delta.finish_reason
    if choice.receipt is None or reason in (None, "error"):
        return None
    return choice.receipt.ended(reason, choice.stop_reason)


def encoded(part: Any) -> orjson.Fragment:
    """A part of a response as JSON: a tenth of the memory of what it is made from."""
    return orjson.Fragment(orjson.dumps(part))


class ReplyWriter(ABC):
    """Writes the response to one request, in the words of a protocol. ``continuous_usage``: events
    tell of the usage of their moment."""

    continuous_usage = False

    def __init__(self, options: OutputOptions) -> None:
        self.options = options

    @abstractmethod
    def events(self, deltas: Sequence[Delta], usage: dict[str, Any] | None) -> bytes:
        """The events that tell of ``deltas``; none at all where there is no news in them.

        ``usage`` is that of this moment, None unless ``continuous_usage``.
        """

    @abstractmethod
    def end(self, usage: dict[str, Any]) -> bytes:
        """The last events of a stream that came to its end."""

    @abstractmethod
    def take(self, deltas: Sequence[Delta]) -> None:
        """What a response says that is told whole, as it comes: no delta is kept, which is a
        hundred times its text."""

    @abstractmethod
    def whole(self, usage: dict[str, Any]) -> bytes:
        """The whole response, of all that was taken."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """The events that end a stream that fails."""

    async def settle(self) -> None:  # noqa: B027  (most have nothing to do)
        """Comes after `end` or `whole`, before the client hears of them."""


class ResponseWriter(ReplyWriter):
    """Writes a response of OpenAI's older protocols. A subclass knows how its endpoint tells of
    choices; what every response has beside them, the header it begins with, its usage and its seed,
    is written here.

    ``seed`` is None unless the client asked for it, and one per prompt where there are several.
    ``notes`` say what was asked of the output and left to the model.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    opens: ClassVar[bool] = False  # the first chunk of a choice tells of none of its tokens
    # In whole replies all the same: vLLM's clients look at them.
    not_asked: ClassVar = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))

    def __init__(
        self,
        header: dict[str, Any],
        options: OutputOptions,
        formatter: LogprobsFormatter,
        seed: int | list[int] | None,
        stream_options: StreamOptions | None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(options)
        self.formatter = formatter
        self.seed = seed
        self.notes = list(notes)
        self._header = header
        self._choices: dict[int, WholeChoice] = {}  # of a response that is told whole
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice
        self._scores: dict[int, orjson.Fragment] = {}  # by the identity of a prompt
        self._include_usage = bool(stream_options and stream_options.include_usage)
        if stream_options is not None and self._include_usage:
            self.continuous_usage = bool(stream_options.continuous_usage_stats)

    @abstractmethod
    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """What the whole response says of its choices: all that each said is one delta."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says of one delta; nothing where there is no news in it."""

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            index = delta.choice.index
            if index not in self._choices:
                self._choices[index] = WholeChoice(self.options.tells_tokens)
            self._choices[index].add(delta)

    def whole(self, usage: dict[str, Any]) -> bytes:
        choices = [choice.delta() for _, choice in sorted(self._choices.items())]
        content = {**self._header, **self.body(choices), "usage": usage}
        if self.seed is not None:
            content["seed"] = self.seed
        if self.notes:
            content["constraint_notes"] = self.notes
        return orjson.dumps(content)

    def events(self, deltas: Sequence[Delta], usage: dict[str, Any] | None) -> bytes:
        if usage is None and len(deltas) == 1 and self._adds_text_alone(deltas[0]):
            return self._text_event(deltas[0])
        return b"".join(
            self._text_event(delta)
            if usage is None and self._adds_text_alone(delta)
            else self._full_events(delta, usage)
            for delta in deltas
        )

    def _adds_text_alone(self, delta: Delta) -> bool:
        """Whether there is nothing to tell but text, as of nearly every token."""
        more = delta.first or delta.finish_reason or delta.reasoning or delta.calls
        return not (more or self.options.tells_tokens)

    def _text_event(self, delta: Delta) -> bytes:
        """An event in which only the text is new: what stands around it was encoded before."""
        if not delta.text:
            return b""
        frame = self._frames.get(delta.choice.index)
        if frame is None:
            whole = self._full_events(msgspec.structs.replace(delta, text=_PLACE), None)
            head, tail = whole.split(orjson.dumps(_PLACE))
            self._frames[delta.choice.index] = frame = (head, tail)
        return frame[0] + orjson.dumps(delta.text) + frame[1]

    def _full_events(self, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        return b"".join(map(server_sent_event, self.completed_chunks(delta, usage)))

    def end(self, usage: dict[str, Any]) -> bytes:
        if not self._include_usage:
            return DONE
        return server_sent_event({**self._header, "choices": [], "usage": usage}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return server_sent_event(error.body()) + DONE

    def has_news(self, delta: Delta) -> bool:
        """Whether a stream must tell of ``delta`` now: its text may be held back."""
        tells_tokens = self.options.tells_tokens and delta.token_ids
        says = delta.text or delta.reasoning or delta.calls
        return bool(says or delta.finish_reason or tells_tokens)

    def told_tokens(self, delta: Delta) -> dict[str, Any]:
        """What a choice tells of its single tokens on request, apart from log-probabilities."""
        told: dict[str, Any] = {}
        if self.options.return_token_ids:
            told["token_ids"] = delta.token_ids
        if self.options.return_token_bytes:
            told["token_bytes"] = list(map(self.formatter.bytes_of, delta.token_ids))
            if self.options.draft:
                told["rejected_bytes"] = list(map(self._rejected_bytes, delta.origins))
        if self.options.candidates:
            told["candidates"] = self.formatter.candidates(delta.logprobs)
        if self.options.certificate:
            told["certificates"] = delta.certificates
        if self.options.draft:
            told["drafts"] = delta.origins
        receipt = receipt_of(delta)
        if receipt is not None:
            told["receipt"] = receipt
        if delta.choice.error is not None:
            told |= bad_request(delta.choice.error).body()
        return told

    def _rejected_bytes(self, origin: TokenOrigin) -> list[int] | None:
        return None if origin.rejected is None else self.formatter.bytes_of(origin.rejected)

    def prompt_scores(self, choice: Choice) -> orjson.Fragment:
        """The log-probabilities of the prompt, which are the same for all choices of it."""
        name = id(choice.request.prompt_ids)
        if name not in self._scores:
            self._scores[name] = encoded(self.formatter.prompt(choice.prompt_logprobs or ()))
        return self._scores[name]

    def completed_chunks(
        self, delta: Delta, usage: dict[str, Any] | None
    ) -> Iterator[dict[str, Any]]:
        """The whole chunks that tell of ``delta``; ``usage`` as in `events`, but for the tokens, of
        which each chunk counts those of its own choice."""
        for i, own in enumerate(self.chunks(delta)):
            chunk = {**self._header, **own}
            if self._include_usage:
                later = len(delta.token_ids) if self.opens and delta.first and i == 0 else 0
                said = delta.choice.generated - later
                chunk["usage"] = usage and usage | {
                    "completion_tokens": said,
                    "total_tokens": usage["prompt_tokens"] + said,
                }
            if self.seed is not None and delta.first and i == 0:
                chunk["seed"] = self.seed
            if self.notes and delta.first and i == 0:
                chunk["constraint_notes"] = self.notes
            yield chunk
