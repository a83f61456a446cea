"""What engines tell their clients, as one digest, and while a part of them is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from lexshard.actors.body.parallel.parallel_body import ParallelBody
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from lexshard.loadtest.token_digest import digest

Tokens = list[tuple[int, ...]]  # of each request

BACK_SECONDS = 15.0  # on a machine of its own, which takes 1.3 to 4.7


def seconds_to_be_back() -> float:
    """Where others take the cores, too, the process of a new rank starts slowly."""
    share = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(60.0, BACK_SECONDS * max(1.0, share))


def told(engine: Engine, requests: list[Request]) -> str:
    """The digest of all that clients are told, to the last bit of every log-probability; ends the
    engine."""
    try:
        completions = []
        for first in range(0, len(requests), 100):
            completions += run_to_completion(engine, requests[first : first + 100])
        engine.check_idle()
        return digest(completions)
    finally:
        engine.close()


def through_losses(
    engine: Engine,
    requests: list[Request],
    lose: Callable[[], None],
    after: tuple[int, ...] = (6, 14),
) -> tuple[Tokens, float]:
    """The tokens of each of ``requests``, and the seconds of the longest step from the first time
    on that ``lose`` is called, which is ``after`` so many steps, in their midst."""
    tokens = {(each.request_id, each.choice): list[int]() for each in requests}
    for request in requests:
        assert engine.submit(request) is None
    left, steps, longest = len(requests), 0, 0.0
    while left:
        if steps in after:
            lose()
        began = time.monotonic()
        for event in engine.step():
            tokens[event.request_id, event.choice].extend(event.token_ids)
            left -= event.finish_reason is not None
        if steps >= after[0]:
            longest = max(longest, time.monotonic() - began)
        steps += 1
    engine.check_idle()
    return [tuple(each) for each in tokens.values()], longest


def told_while_ranks_are_lost(
    engine: Engine, requests: list[Request], number: signal.Signals
) -> Tokens:
    """The tokens of each choice, while two ranks get a signal in the midst of a step, one after the
    other. What is lost is noticed at once or, of one that was stopped, after a while; a successor
    is there in `seconds_to_be_back`. Ends the engine."""
    body = engine.model.body
    assert isinstance(body, ParallelBody)

    def lose() -> None:
        others = [role for role in engine.roles() if role.name == "body" and role.index]
        os.kill(others[body.ranks_lost % len(others)].place.process_id, number)

    tokens, longest = through_losses(engine, requests, lose)
    assert body.ranks_lost == 2
    print(f"{number.name} of a rank: {longest:.1f} s without a token at most")
    assert longest < seconds_to_be_back()
    engine.close()
    return tokens


def tokens_of(engine: Engine, requests: list[Request]) -> Tokens:
    """The tokens of each choice; ends the engine."""
    completions = run_to_completion(engine, requests)
    engine.close()
    return [each.token_ids for each in completions]
