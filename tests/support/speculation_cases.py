"""Requests of every kind of sampling, drafters that are told what to guess, engines to run both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.engine.completion import Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.demo_engine import demo_engine

KINDS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.9),
    SamplingParameters(temperature=1.2, top_k=40, top_p=0.9),
    SamplingParameters(temperature=0.8, top_p=0.8),
    SamplingParameters(
        temperature=0.9,
        top_k=50,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.5,
        logit_bias=((5, 2.0),),
        bad_words=((11,), (12, 13)),
        min_tokens=9,
    ),
    SamplingParameters(temperature=0.0, repetition_penalty=1.4, frequency_penalty=-0.2),
    SamplingParameters(temperature=0.7, logprobs=2, prompt_logprobs=1),
    SamplingParameters(temperature=0.0, allowed_ids=tuple(range(300, 600)), certificate=True),
)


class Says:
    """A drafter that says of each task what ``draft_of`` does."""

    name = "an oracle"

    def __init__(self, draft_of: Callable[[DraftTask], Draft]) -> None:
        self._draft_of = draft_of

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [self._draft_of(task) for task in tasks]

    def forget(self, sequence: int) -> None:
        pass


class Guesses(Says):
    """One that knows what is to come and says it, or something else, at random."""

    def __init__(self, truth: dict[tuple[int, ...], tuple[int, ...]], share: float) -> None:
        super().__init__(lambda task: Draft(self._guess(tuple(task.history))))
        self._truth = truth
        self._share = share
        self._random = np.random.default_rng(7)
        self.right = 0
        self.wrong = 0

    def _guess(self, history: tuple[int, ...]) -> list[int]:
        prompt = next(each for each in self._truth if history[: len(each)] == each)
        rest = self._truth[prompt][len(history) - len(prompt) :]
        guesses: list[int] = []
        for index in range(int(self._random.integers(0, 6))):
            right = index < len(rest) and self._random.random() < self._share
            self.right, self.wrong = self.right + right, self.wrong + (not right)
            guesses.append(rest[index] if right else int(self._random.integers(0, 1000)))
        return guesses


def requests_of(prompt_ids: list[tuple[int, ...]], count: int) -> list[Request]:
    """Every kind in turn; some end by themselves, some at a stop token, all prompts differ."""
    random = np.random.default_rng(3)
    requests = []
    for index in range(count):
        parameters = replace(
            KINDS[index % len(KINDS)],
            max_tokens=int(random.integers(1, 30)),
            seed=int(random.integers(0, 2**63)),
            ignore_eos=index % 3 != 0,
            stop_token_ids=tuple(random.integers(0, 2000, 40).tolist()),
        )
        prompt = (index + 20, *prompt_ids[index][:60])
        requests.append(Request(str(index), 0, prompt, parameters))
    return requests


def drafting_engine(drafter: Drafter | None = None, **changes: Any) -> Engine:
    """The demo in 128 tokens of context."""
    return demo_engine(drafter, **{"max_model_len": 128, "draft_length": "fixed", **changes})


def run_and_close(engine: Engine, requests: list[Request]) -> list[Completion]:
    try:
        completions = run_to_completion(engine, requests)
        engine.check_idle()
        return completions
    finally:
        engine.close()
