"""Run a list of sequences to their end: what ``Engine.generate`` returns."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass

from actors.messages import FinishReason, Request, SequenceEvent, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice."""

    request_id: str
    choice: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    error: str | None


class Collector:
    """Gathers a sequence's events until it ends."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.completion: Completion | None = None

    def take(self, event: SequenceEvent) -> None:
        self._token_ids.extend(event.token_ids)
        self._logprobs.extend(event.logprobs)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            self.completion = Completion(
                request_id=event.request_id,
                choice=event.choice,
                prompt_ids=self._request.prompt_ids,
                token_ids=tuple(self._token_ids),
                finish_reason=event.finish_reason,
                stop_reason=event.stop_reason,
                logprobs=tuple(self._logprobs),
                prompt_logprobs=self._prompt_logprobs,
                error=event.error,
            )


def run_to_completion(
    requests: Sequenced[Request],
    submit: Callable[[Request], SequenceEvent | None],
    step: Callable[[], list[SequenceEvent]],
) -> list[Completion]:
    """Submit everything, step until all has ended; completions in the order of ``requests``."""
    collectors = {(each.request_id, each.choice): Collector(each) for each in requests}
    unfinished = len(collectors)
    for request in requests:
        refusal = submit(request)
        if refusal is not None:
            collectors[request.request_id, request.choice].take(refusal)
            unfinished -= 1
    while unfinished:
        for event in step():
            collector = collectors.get((event.request_id, event.choice))
            if collector is not None:
                collector.take(event)
                unfinished -= event.finish_reason is not None
    return [each.completion for each in collectors.values() if each.completion is not None]
