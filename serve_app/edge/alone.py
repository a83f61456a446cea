"""What the draft model says by itself while the server is away: quick, and another model's text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.drafter.draft_cache import MOST_PENDING
from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.messages import FinishReason, Request, SamplingParameters, SequenceEvent
from lexshard.actors.states.sequence_state import SequenceState

TOKENS_AT_ONCE = 8
# What takes a sampler to do, by the name that clients have for it.
NOT_ALONE = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "bad_words": (),
    "allowed_ids": None,
    "grammar": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "certificate": False,
}


class LoneDrafter:
    """The draft model as ``information`` describes it; called in a thread of ``executor``."""

    def __init__(
        self, drafter: GuessingModel, information: EngineInformation, executor: Executor
    ) -> None:
        self.information = information
        self._drafter = drafter
        self._executor = executor
        self._sequences = 0

    def say(
        self, request: Request, emit: Callable[[SequenceEvent], None]
    ) -> Coroutine[Any, Any, None]:
        """Says a text; every event goes to ``emit``. Requests for what takes more than drawing are
        refused there."""
        self._sequences -= 1  # those of the link count up
        return self._say(request, emit, self._sequences)

    async def _say(
        self, request: Request, emit: Callable[[SequenceEvent], None], sequence: int
    ) -> None:
        parameters, name, choice = request.parameters, request.request_id, request.choice
        asked = [
            each for each, neutral in NOT_ALONE.items() if getattr(parameters, each) != neutral
        ]
        if asked:
            reason = f"the server is away, and the draft model alone has no {', '.join(asked)}"
            emit(SequenceEvent(name, choice, (), finish_reason="error", error=reason, refused=True))
            return
        information = self.information
        state = SequenceState(request, information.vocabulary_size, information.eos_token_ids)
        history = list(request.prompt_ids)
        loop = asyncio.get_running_loop()
        said = 0
        end: FinishReason | None = None
        try:
            while end is None:
                most = min(TOKENS_AT_ONCE, parameters.max_tokens - said)
                task = DraftTask(
                    sequence,
                    history,
                    most,
                    state.key,
                    state.inverse_temperature,
                    top_k=state.top_k,
                    top_p=parameters.top_p,
                    min_p=parameters.min_p,
                )
                tokens = await loop.run_in_executor(self._executor, self._draw, task)
                told: list[int] = []
                stop: int | None = None
                for token in tokens:
                    told.append(token)
                    end, stop = _ends(parameters, information, token, said + len(told))
                    if end is not None:
                        break
                said += len(told)
                history.extend(told)
                if not told:
                    end = "length"  # there is no room for more
                emit(SequenceEvent(name, choice, tuple(told), finish_reason=end, stop_reason=stop))
        finally:
            self._drafter.forget(sequence)

    def _draw(self, task: DraftTask) -> tuple[int, ...]:
        for _ in range(len(task.history) // MOST_PENDING + 1):
            [drafted] = self._drafter.propose([task])
            if drafted.token_ids:
                break
        return tuple(drafted.token_ids)


def _ends(
    parameters: SamplingParameters, information: EngineInformation, token: int, said: int
) -> tuple[FinishReason | None, int | None]:
    if token in parameters.stop_token_ids:
        return "stop", token
    if not parameters.ignore_eos and token in information.eos_token_ids:
        return "stop", None
    return ("length" if said >= parameters.max_tokens else None), None
