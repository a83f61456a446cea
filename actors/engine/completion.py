"""Run a list of sequences to their end: what ``Engine.generate`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lexshard.actors.messages import (
    FinishReason,
    Request,
    SequenceEvent,
    TokenLogprobs,
)
from lexshard.actors.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. ``text`` is None where no detokeniser was given."""

    request_id: str
    choice: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    error: str | None


class Collector:
    """Gathers a sequence's events until it ends; a stop string of the detokeniser ends it too."""

    def __init__(self, request: Request, detokenizer: Detokenizer | None = None) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.completion: Completion | None = None

    def take(self, event: SequenceEvent) -> None:
        """Raises RuntimeError for an event after the end."""
        if self.completion is not None:
            raise RuntimeError(f"{event.request_id} went on after its end")
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        used, stop_string = self._push_text(event)
        self._token_ids.extend(event.token_ids[:used])
        self._logprobs.extend(event.logprobs[:used])
        if stop_string is not None:
            self._finish(event, "stop", stop_string)
        elif event.finish_reason is not None:
            self._finish(event, event.finish_reason, event.stop_reason)

    def _push_text(self, event: SequenceEvent) -> tuple[int, str | None]:
        """Feed the text; how many tokens were used, and the stop string they completed. A token the
        engine stopped at is no text."""
        tokens, detokenizer = event.token_ids, self._detokenizer
        if detokenizer is not None:
            shown = tokens[:-1] if event.finish_reason == "stop" else tokens
            for i, token_id in enumerate(shown):
                if detokenizer.push(token_id):
                    return i + 1, detokenizer.stop_string
        return len(tokens), None

    def _finish(
        self, event: SequenceEvent, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        self.completion = Completion(
            request_id=event.request_id,
            choice=event.choice,
            prompt_ids=self._request.prompt_ids,
            token_ids=tuple(self._token_ids),
            text=None if self._detokenizer is None else self._detokenizer.finish(),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            error=None if reason == "stop" else event.error,
        )


class SteppingEngine(Protocol):
    """The part of an engine that running to completion needs."""

    def submit(self, request: Request) -> SequenceEvent | None: ...
    def step(self) -> list[SequenceEvent]: ...
    def cancel(self, request_id: str) -> None: ...


def run_to_completion(
    engine: SteppingEngine,
    requests: Sequence[Request],
    make_detokenizer: Callable[[], Detokenizer] | None = None,
) -> list[Completion]:
    """Submit everything, step until all has ended; completions in the order of ``requests``.

    With ``make_detokenizer`` completions carry text, and stop strings end sequences (whose
    requests must then have one choice each: a request is cancelled whole).
    """
    collectors = {
        (each.request_id, each.choice): Collector(each, make_detokenizer and make_detokenizer())
        for each in requests
    }
    refusals = [refusal for each in requests if (refusal := engine.submit(each)) is not None]
    unfinished = set(collectors)
    events = refusals
    while unfinished:
        for event in events:
            name = (event.request_id, event.choice)
            if name not in unfinished:
                continue
            collector = collectors[name]
            collector.take(event)
            if collector.completion is not None:
                unfinished.remove(name)
                if event.finish_reason is None:
                    engine.cancel(event.request_id)
        if unfinished:
            events = engine.step()
    return [each.completion for each in collectors.values() if each.completion is not None]
