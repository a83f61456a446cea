"""One choice of a response: from the engine's events to text, with what belongs to each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec

from lexshard.actors.messages import (
    Certificate,
    FinishReason,
    Request,
    SequenceEvent,
    TokenLogprobs,
    TokenOrigin,
)
from lexshard.actors.text.detokenizer import Detokenizer
from lexshard.actors.text.token_bytes import TokenBytes
from lexshard.serve_app.admission import waiting_cost
from lexshard.serve_app.receipts.issuing import OpenReceipt
from lexshard.serve_app.tools.calls import CallPiece
from lexshard.serve_app.tools.reply_parser import ReplyParser
from lexshard.serve_app.tools.reply_reader import ReplyReader, Run, SpokenSum


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How tokens become the reply. ``logprobs`` None: no log-probabilities in the reply."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    reasoning: bool = True  # is told
    echo: bool = False
    discard_output: bool = False
    tokens_as_ids: bool = False
    return_token_ids: bool = False
    return_token_bytes: bool = False
    candidates: bool = False
    prompt_logprobs: bool = False
    certificate: bool = False
    draft: bool = False

    @property
    def tells_tokens(self) -> bool:
        """Whether the reply speaks of single tokens, also of those whose text is held back."""
        ids = self.return_token_ids or self.return_token_bytes
        evidence = self.certificate or self.draft or self.candidates
        return self.logprobs is not None or ids or evidence

    @property
    def tells_much(self) -> bool:
        """Whether the reply may be many times as long as its text."""
        return self.tells_tokens or self.prompt_logprobs


class Delta(msgspec.Struct, frozen=True, eq=False):
    """What one event adds to a choice. ``offsets`` are where in the choice's text its tokens
    begin, in characters; ``logprobs`` stand beside them, after those of an echoed prompt.
    ``certificates`` and ``origins`` stand beside ``token_ids``; empty unless asked for.
    ``reasoning`` and ``calls`` are what is no part of ``text``, of a reply that is parsed;
    ``parts`` are text and pieces of calls in their order, and ``said`` tells which tokens, these
    and those before that no delta has told of, say which part."""

    choice: Choice
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    offsets: Sequence[int]
    certificates: Sequence[Certificate]
    origins: Sequence[TokenOrigin]
    first: bool
    finish_reason: FinishReason | None
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    parts: Sequence[str | CallPiece] = ()
    said: Sequence[Run] = ()


@dataclass(slots=True, eq=False)
class Choice:
    """The state of one choice. ``finish_reason`` is None while it runs, ``error`` says why it is
    ``error``. ``parser`` tells reasoning and calls of tools from its text, if anything does;
    ``called``: there were some, and no stop string or token cut the last of them. ``receipt`` is
    written as it goes on, where the client wants one."""

    index: int
    request: Request
    echo_text: str
    options: OutputOptions
    token_bytes: InitVar[TokenBytes]
    parser: ReplyParser | None = None
    receipt: OpenReceipt | None = None
    generated: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    called: bool = False
    _started: bool = False
    _detokenizer: Detokenizer = field(init=False)
    _reader: ReplyReader = field(init=False)

    def __post_init__(self, token_bytes: TokenBytes) -> None:
        stop, include_stop = self.options.stop, self.options.include_stop
        least = self.request.parameters.min_tokens
        self._detokenizer = Detokenizer(token_bytes, stop, include_stop, least)
        self._reader = ReplyReader(self.parser)

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    @property
    def waiting_tokens(self) -> int:
        """What the engine computes before it begins."""
        scored = self.request.parameters.prompt_logprobs is not None
        return waiting_cost(len(self.request.prompt_ids), self.request.choice, scored)

    def take(self, event: SequenceEvent) -> Delta:
        """What ``event`` adds. A stop string ends the choice, whatever the engine thinks."""
        first, self._started = not self._started, True
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        token_ids: Sequence[int] = event.token_ids
        logprobs: Sequence[TokenLogprobs | None] = event.logprobs
        certificates: Sequence[Certificate] = event.certificates
        origins: Sequence[TokenOrigin] = event.origins
        reason = event.finish_reason
        stop_reason = event.stop_reason
        offsets: list[int] = []
        if self.options.discard_output:
            token_ids, logprobs, certificates, origins = (), (), (), ()
            reason, stop_reason = "length", None
        elif token_ids:
            used, stop_string = self._push(token_ids, reason, offsets)
            if stop_string is not None:
                reason, stop_reason = "stop", stop_string
                token_ids, logprobs = token_ids[:used], logprobs[:used]
                certificates, origins = certificates[:used], origins[:used]
        self.generated += len(token_ids)
        if self.receipt is not None:
            self.receipt.add(tuple(token_ids), event.logits[: len(token_ids)])
        last = reason is not None
        self._reader.read(self._detokenizer.finish() if last else self._detokenizer.take(), last)
        spoken, said = self._reader.taken()
        text, calls, parts = spoken.content, spoken.calls, spoken.parts
        self.called = self.called or bool(calls)
        if stop_reason is not None and self.parser is not None and self.parser.amid_call:
            self.called = False
        if first and self.options.echo:
            text, parts = self.echo_text + text, (self.echo_text, *parts)
            if self.options.logprobs is not None:
                logprobs = [*(self.prompt_logprobs or ()), *logprobs]
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error = event.error if reason == "error" else None
        return Delta(
            self,
            text,
            token_ids,
            logprobs,
            offsets,
            certificates,
            origins,
            first,
            reason,
            spoken.reasoning if self.options.reasoning else "",
            calls,
            parts,
            said,
        )

    def _push(
        self, token_ids: Sequence[int], reason: FinishReason | None, offsets: list[int]
    ) -> tuple[int, str | None]:
        """Feeds tokens to the text; how many were used and the stop string they completed.

        The token the engine stopped at is part of the text only on request.
        """
        detokenizer = self._detokenizer
        shown = len(token_ids)
        if reason == "stop" and not self.options.include_stop:
            shown -= 1
        wants_offsets = self.options.logprobs is not None
        for i, token_id in enumerate(token_ids):
            if wants_offsets:
                offsets.append(len(self.echo_text) + detokenizer.decoded_length)
            if i < shown:
                self._reader.token()
                stopped = detokenizer.push(token_id)
                if self.parser is not None:
                    self.parser.token(token_id, detokenizer.decoded_length)
                if stopped:
                    return i + 1, detokenizer.stop_string
                if self.parser is not None:
                    self._reader.read(detokenizer.take())
        return len(token_ids), None


class WholeChoice:
    """Adds up all that one choice says, as if one event had brought it. ``tokens``: what belongs to
    single tokens, too."""

    def __init__(self, tokens: bool) -> None:
        several = ("token_ids", "logprobs", "offsets", "certificates", "origins")
        self._lists: dict[str, list[Any]] = {name: [] for name in several if tokens}
        self._none: dict[str, Any] = dict.fromkeys(several, ())
        self._spoken = SpokenSum()
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self._last = delta
        self._spoken.add(delta.reasoning, delta.parts)
        for name, values in self._lists.items():
            values += getattr(delta, name)

    def delta(self) -> Delta:
        """All of it; there must be some."""
        last, spoken = self._last, self._spoken.spoken()
        assert last is not None
        return Delta(
            choice=last.choice,
            text=spoken.content,
            first=True,
            finish_reason=last.finish_reason,
            reasoning=spoken.reasoning,
            calls=spoken.calls,
            parts=spoken.parts,
            **{**self._none, **self._lists},
        )
