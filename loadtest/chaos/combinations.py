"""Engines of several shapes under random combinations of everything a request may ask for.

No server: the loop of an engine (`actors.engine.loop`) in this process, which is looked at after
every step. Drafts, masks, bans, stops, choices, penalties, preemption and cancellation meet as no
test would think of. What a sequence says must be what a plain engine says (one step after the
other, no drafts, no prefix cache, every logit), and none may be forgotten: a sequence that is
not in the plan of a step that has room waits for a place, for blocks, or for a prompt on its way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.task import Draft, DraftTask
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.engine.step_plan import Chunk, StepPlan
from lexshard.actors.messages import (
    Commands,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow, counted

EACH, EACH_QUICK = 2_500, 200  # sequences of a shape
CONTEXT = 160
UNPLANNED_STEPS = 100
ROOM_TOKENS = 12  # of a step that has room: what the dearest next token of a sequence may cost
ALLOWED = (11, 12, 13)  # of those who may say little: soon nothing is left

Tokens = tuple[int, ...]
Name = tuple[str, int]  # request and choice


@dataclass(frozen=True)
class Shape:
    """An engine. ``guesses`` are its drafter's, where it knows what comes and mostly says it;
    ``same`` says that its draws do not depend on guesses."""

    settings: dict[str, Any]
    guesses: float | None = None
    blocks: int | None = None
    same: bool = True


def shapes(draft: str) -> dict[str, Shape]:
    """The engines by name; ``draft`` is a draft model."""
    model = {"draft": draft}
    return {
        "no drafts": Shape({}),
        "no drafts, little room": Shape({}, blocks=16),
        "draft model": Shape(model),
        "n-grams": Shape({"draft": "ngram", "draft_length": "fixed"}),
        "right guesses": Shape({"draft_length": "fixed"}, guesses=0.8),
        "exact": Shape(
            {**model, "verify": "same-distribution", "draft_length": "fixed"}, same=False
        ),
        "draft model, samplers": Shape({**model, "samplers": 2}),
        "n-grams, samplers": Shape({"draft": "ngram", "samplers": 2}),
        "little room": Shape({"draft_length": "stepping"}, guesses=0.6, blocks=16),
        "small steps": Shape(
            {"draft": "ngram", "step_tokens": 24, "max_running": 5, "head": "dense"}
        ),
    }


@dataclass
class Combination:
    """One client request's sequences, and after how many tokens of the first its client leaves."""

    requests: list[Request]
    leaves_after: int | None


class Guesses:
    """A drafter that knows what comes, and says it ``share`` of the time."""

    name = "one that knows"

    def __init__(self, truth: dict[Name, Tokens], share: float, seed: int) -> None:
        self._truth = truth
        self._share = share
        self._random = random.Random(seed)
        self._lengths: dict[int, tuple[Name, int]] = {}

    def learn(self, sequence: int, request: Request) -> None:
        """Which sequence of the engine answers ``request``."""
        self._lengths[sequence] = (name_of(request), len(request.prompt_ids))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [Draft(self._guess(task)) for task in tasks]

    def _guess(self, task: DraftTask) -> list[int]:
        name, length = self._lengths[task.sequence]
        rest = self._truth[name][len(task.history) - length :]
        # After its end, the last token again: a guess where there is nothing left to choose from.
        coming = [*rest, *task.history[-1:], *ALLOWED]
        guesses = coming[: self._random.randint(0, task.most)]
        return [
            token if self._random.random() < self._share else self._random.randrange(16_000)
            for token in guesses
        ]

    def forget(self, sequence: int) -> None:
        self._lengths.pop(sequence, None)


def name_of(request: Request | SequenceEvent) -> Name:
    return request.request_id, request.choice


def combination(draw: random.Random, index: int, prompts: Sequence[Tokens]) -> Combination:
    """The ``index``-th request of a campaign: anything with anything."""
    some = draw.random
    prompt = draw.choice(prompts)[: draw.choice([1, 2, 15, 16, 17, 33, 48, 60, 90])]
    if some() < 0.5:
        prompt = (index % 16_000, *prompt)
    little = some() < 0.25
    phrases = [
        tuple(draw.choices(ALLOWED, k=draw.randint(1, 4))) for _ in range(draw.randint(1, 6))
    ]
    bans = tuple(phrases) if some() < (0.8 if little else 0.2) else ()
    parameters = SamplingParameters(
        temperature=draw.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        top_k=draw.choice([0, 0, 1, 5, 50]),
        top_p=draw.choice([1.0, 1.0, 0.9, 0.5]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        frequency_penalty=draw.choice([0.0, 0.0, -0.3]),
        logit_bias=draw.choice([(), (), ((5, 3.0), (11, -100.0)), ((12, 100.0),)]),
        bad_words=bans,
        allowed_ids=ALLOWED[: draw.randint(1, 3)] if little else draw.choice([None, ALLOWED_MANY]),
        min_tokens=draw.choice([0, 0, 3, 10]),
        max_tokens=draw.choice([1, 2, 3, 8, 20, 45]),
        stop_token_ids=draw.choice([(), (), (12,), tuple(range(200, 900))]),
        ignore_eos=some() < 0.5,
        seed=draw.randrange(2**63),
        logprobs=draw.choice([None, None, None, 0, 2]),
        prompt_logprobs=draw.choice([None, None, None, None, 0, 3]),
        certificate=some() < 0.2,
        draft=some() < 0.2,
    )
    if some() < 0.2:
        parameters = replace(
            parameters,
            grammar=draw.choice(GRAMMARS),
            allowed_ids=None,
            min_tokens=0,
            ignore_eos=False,
        )
    if parameters.prompt_logprobs is not None and some() < 0.3:
        parameters = replace(parameters, max_tokens=0, min_tokens=0)
    client, priority = draw.choice("abc"), draw.choice([0, 0, 0, -1, 2])
    requests = [
        Request(f"{index}", choice, prompt, parameters, priority, client=client)
        for choice in range(draw.choice([1, 1, 1, 2, 5]))
    ]
    return Combination(requests, draw.choice([0, 1, 4, 9]) if some() < 0.2 else None)


ALLOWED_MANY = tuple(range(3, 3000, 2))
# Numbers, free text, text that is forced in the midst or from the beginning to the end.
GRAMMARS = (
    'start: "[" NUMBER ("," NUMBER)* "]"\nNUMBER: /[0-9]{1,3}/\n',
    "start: /[^.]{3,40}[.]/\n",
    'start: "Once upon a time" (" there was a " | " in a far country ") /[a-z ]+/ "."\n',
    'start: "all of it is said"\n',
)


@dataclass
class Watch:
    """Runs combinations through an engine's loop: its source of commands, and who looks on."""

    engine: Engine
    combinations: list[Combination]
    draw: random.Random
    guesses: Guesses | None
    said: dict[Name, list[int]] = field(default_factory=dict)
    ends: dict[Name, SequenceEvent] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    step: int = 0
    _next: int = 0
    _live: dict[str, Combination] = field(default_factory=dict)
    _asked: bool = False
    _unplanned: dict[Name, int] = field(default_factory=dict)  # steps, for no reason

    def run(self) -> None:
        """Until every combination has come to its end, or one never will."""
        plan = self.engine.steps.plan
        submit = self.engine.submit

        def planned() -> StepPlan | None:
            made = plan()
            self._look_at(() if made is None else made.chunks)
            return made

        def submitted(request: Request) -> SequenceEvent | None:
            refusal = submit(request)
            if refusal is None and self.guesses is not None:
                self.guesses.learn(self.engine.sequences(request.request_id)[-1].arrival, request)
            return refusal

        with_watch: Any = self.engine
        with_watch.steps.plan, with_watch.submit = planned, submitted
        run_engine(self.engine, self, self.hear, report_seconds=0.001)

    def receive(self, wait_seconds: float) -> Commands | None:
        """Between two steps: what is asked for next."""
        if self._asked:
            self._asked = False
            return None
        self._asked = True
        self.step += 1
        try:
            self.engine.check_idle()
        except RuntimeError as error:
            self.wrong.append(f"books do not add up | {error}")
        if self.wrong or (self._next == len(self.combinations) and not self._live):
            return Commands(stop=True)
        room = self.draw.choice([1, 4, 20, 60]) - len(self._live)
        coming = self.combinations[self._next : self._next + max(0, room)]
        self._next += len(coming)
        for each in coming:
            self._live[each.requests[0].request_id] = each
            for request in each.requests:
                self.said[name_of(request)] = []
        leaving = [name for name, each in self._live.items() if self._leaves(each)]
        for name in leaving:
            del self._live[name]
        submit = tuple(request for each in coming for request in each.requests)
        return Commands(submit, tuple(leaving))

    def _leaves(self, each: Combination) -> bool:
        first = each.requests[0]
        return (
            each.leaves_after is not None
            and name_of(first) in self.said
            and len(self.said[name_of(first)]) >= each.leaves_after
        )

    def hear(self, output: StepOutput) -> None:
        for event in output.events:
            each = self._live.get(event.request_id)
            if each is None:
                continue
            name = name_of(event)
            if name in self.ends:
                self.wrong.append(f"went on after its end | {name}")
            self.said[name].extend(event.token_ids)
            if event.finish_reason is not None:
                self.ends[name] = event
                if all(name_of(request) in self.ends for request in each.requests):
                    del self._live[event.request_id]

    def _look_at(self, chunks: Sequence[Chunk]) -> None:
        """A step was planned: who is not part of it, although it has room?"""
        planned = {chunk.sequence for chunk in chunks}
        cost = sum(chunk.sequence.cost(0, chunk.count) for chunk in chunks)
        room = cost + ROOM_TOKENS <= self.engine.step_tokens
        for request_id in self._live:
            for sequence in self.engine.sequences(request_id):
                name = name_of(sequence.request)
                if sequence in planned:
                    self._unplanned.pop(name, None)
                elif room and self.engine.waits_for(sequence) is None:
                    self._unplanned[name] = self._unplanned.get(name, 0) + 1
                    if self._unplanned[name] > UNPLANNED_STEPS:
                        self.wrong.append(f"in no plan for {UNPLANNED_STEPS} steps | {name}")


def run_combinations(
    report: ChaosReport, model: str, chosen: Mapping[str, Shape], *, quick: bool, only: str | None
) -> None:
    """All ``chosen`` shapes, or ``only`` one of them."""
    count = EACH_QUICK if quick else EACH
    for number, (name, shape) in enumerate(chosen.items()):
        if only in (None, name):
            report.tell("combinations", f"{name}: {count:,} sequences")
            report.add(_run_shape(name, shape, model, count, report.seed + number))


def _run_shape(name: str, shape: Shape, model: str, count: int, seed: int) -> ChaosRow:
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(1, 16_000) for _ in range(90)) for _ in range(6)]
    combinations: list[Combination] = []
    while sum(len(each.requests) for each in combinations) < count:
        combinations.append(combination(draw, len(combinations), prompts))
    requests = [request for each in combinations for request in each.requests]
    plain = _engine(model, {"head": "dense", "prefix_cache": False, "steps_at_once": 1})
    expected = {(each.request_id, each.choice): each for each in run_to_completion(plain, requests)}
    plain.close()
    truth = {key: each.token_ids for key, each in expected.items()}
    guesses = None if shape.guesses is None else Guesses(truth, shape.guesses, seed)
    settings = dict(shape.settings)
    if shape.blocks is not None:
        settings["kv_cache_bytes"] = shape.blocks * plain.model.body.kv_bytes_per_block()
    engine = _engine(model, settings, guesses)
    watch = Watch(engine, combinations, draw, guesses)
    try:
        watch.run()
        statistics = engine.statistics()
    finally:
        engine.close()
    wrong = list(watch.wrong)
    for key, own in watch.said.items():
        known, end = expected[key], watch.ends.get(key)
        if not shape.same and combinations[int(key[0])].requests[0].parameters.temperature > 0:
            continue  # its draws depend on the guesses
        if tuple(own) != known.token_ids[: None if end else len(own)]:
            wrong.append(f"other tokens than a plain engine's | {key}")
        elif end and (end.finish_reason, end.error) != (known.finish_reason, known.error):
            wrong.append(f"another end than a plain engine's | {key}")
    row = ChaosRow("combinations", name, len(requests), len(watch.ends), wrong=len(wrong))
    row.cut = len(requests) - len(watch.ends)  # by their clients
    row.broken = counted(wrong)
    row.note = (
        f"{watch.step:,} steps, {statistics.preemptions:,} preemptions, "
        f"{statistics.draft_accepted_tokens:,} of {statistics.draft_tokens:,} guesses stood, "
        f"{sum(end.error is not None for end in watch.ends.values()):,} had nothing left to say"
    )
    return row


def _engine(model: str, settings: dict[str, Any], drafter: Drafter | None = None) -> Engine:
    own = {"max_model_len": CONTEXT, "max_running": 32, **settings}
    configuration = EngineConfiguration(model, device="cpu", threads=1, **own)
    return Engine(configuration, start_sampler, drafter)
