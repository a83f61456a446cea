"""Engines that a test steps itself or commands: what they tell, and matchers that are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Commands, Request, SequenceEvent


class Source:
    """One of ``commands``, or None, each time it is asked; then the engine is to stop."""

    def __init__(self, commands: Iterable[Commands | None]) -> None:
        self._commands = iter(commands)

    def receive(self, wait_seconds: float) -> Commands | None:
        return next(self._commands, Commands(stop=True))


def events_of(engine: Engine, *names: str) -> Iterator[SequenceEvent]:
    """All that is still told while requests of these names are there."""
    while any(map(engine.sequences, names)):
        yield from engine.step()


def heard(engine: Engine, requests: Sequence[Request]) -> list[SequenceEvent]:
    """All that is told until they have ended, asked for at once."""
    events = [event for each in requests if (event := engine.submit(each)) is not None]
    events += events_of(engine, *(each.request_id for each in requests))
    engine.check_idle()
    return events


def said_by(name: str, events: Iterable[SequenceEvent]) -> tuple[int, ...]:
    """The tokens of one request."""
    return tuple(token for each in events if each.request_id == name for token in each.token_ids)


class WatchedMatcher:
    """Says what ``matcher`` says; ``before``, which may wait or fail, hears what is asked."""

    def __init__(
        self,
        matcher: Any,
        before: Callable[[str], object],
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._matcher, self._before, self._after = matcher, before, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._matcher, name)
        return partial(self._ask, name, found) if callable(found) else found

    def _ask(self, name: str, method: Callable[..., Any], *given: Any) -> Any:
        self._before(name)
        answer = method(*given)
        self._after()
        return answer
