"""A small model at one end, the target at the other: the text is the target's, in few bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.build import build_drafter
from lexshard.actors.drafter.model import ModelDrafter
from lexshard.actors.edge.drafting import ConformalThreshold, EdgeDrafter, EdgeSettings
from lexshard.actors.edge.frames import EdgeMode
from lexshard.actors.edge.ledger import GuessChain, VerifiedText
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters, SequenceEvent
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close

FALSE_ALARM = 1e-4


@dataclass
class Text:
    """Both ends of one."""

    request: Request
    chain: GuessChain
    drafter: EdgeDrafter
    verified: VerifiedText


class Link:
    """Devices whose frames reach one engine and come back, each text with a drafter of its own.
    With ``ahead`` a second batch follows the first before that is answered."""

    def __init__(self, mode: EdgeMode, *, ahead: bool = False, **options: Any) -> None:
        self.engine: Engine = drafting_engine()
        sparse = {"size": 8, "alpha": 0.1, "eta": 0.05, "first_threshold": 0.02}
        self._settings = EdgeSettings(mode, **sparse, **options)  # type: ignore[arg-type]
        self._ahead = ahead
        drafts = replace(self.engine.configuration, draft=str(DEMO_DRAFT))
        size = self.engine.model.vocabulary_size
        self._model = build_drafter(drafts, blocks=2_000, vocabulary_size=size)
        self.thresholds: list[ConformalThreshold] = []
        self.told = 0  # bits of guesses
        self.guesses = 0
        self.largest = 0  # batch of more than one guess, in bits

    def _text(self, number: int, request: Request) -> Text:
        assert isinstance(self._model, ModelDrafter)
        size = self.engine.model.vocabulary_size
        drafter = EdgeDrafter(self._model, self._settings, request, number, size)
        self.thresholds.append(drafter.threshold)
        verified = VerifiedText(drafter.codec, request)
        return Text(request, GuessChain(request.prompt_ids), drafter, verified)

    def texts(self, requests: list[Request]) -> list[tuple[int, ...]]:
        """What the target says to each, many of them at once."""
        texts = {each.request_id: self._text(i, each) for i, each in enumerate(requests)}
        left = dict(texts)
        for request in requests:
            assert self.engine.submit(texts[request.request_id].verified.request) is None
        silent = 0  # steps
        while left:
            events = self.engine.step()
            silent = 0 if events else silent + 1
            assert silent < 100, "a text waits for ever"
            for event in events:
                text = left[event.request_id]
                self._hear(text, event)
                if event.finish_reason is not None:
                    text.drafter.close()
                    del left[event.request_id]
                    continue
                most = 2 if self._ahead else 1
                while len(text.chain.going) < most and self._send(text):
                    pass
        self.engine.check_idle()
        self.engine.close()
        return [tuple(each.chain.said[len(each.request.prompt_ids) :]) for each in texts.values()]

    def _hear(self, text: Text, event: SequenceEvent) -> None:
        content = text.verified.happened(event)
        if content is not None:
            told = text.chain.event_of(content, text.drafter.codec, text.request)
            last = text.chain.answered.number
            assert told.token_ids == event.token_ids
            assert told.answers == (last if event.answers is None else event.answers)
        text.chain.told(event.token_ids, event.answers)
        text.drafter.heard(len(text.chain.said), goes_on=bool(text.chain.going))

    def _send(self, text: Text) -> bool:
        history = text.chain.history
        room = text.request.parameters.max_tokens - (len(history) - len(text.request.prompt_ids))
        if room < 1 and text.chain.going:
            return False
        batch = text.chain.note(text.drafter.draft(history, max(1, room)))
        content = text.drafter.codec.encode(batch)
        told = text.drafter.codec.batch_bits(batch)
        self.told += told
        self.guesses += len(batch.token_ids)
        self.largest = max(self.largest, told if len(batch.token_ids) > 1 else 0)
        self.engine.draft(text.verified.arrived(text.verified.codec.decode(content)))
        return True


@pytest.mark.parametrize("ahead", [False, True])
def test_guesses_of_the_same_noise_change_no_token(
    prompt_ids: list[tuple[int, ...]], ahead: bool
) -> None:
    requests = requests_of(prompt_ids, 16)
    plain = run_and_close(drafting_engine(), requests)
    link = Link("same-token", ahead=ahead, longest=5)
    assert link.texts(requests) == [completion.token_ids for completion in plain]
    assert link.engine.statistics().draft_accepted_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["csqs", "ksqs", "qs"])
def test_text_follows_the_target_whatever_is_left_out(
    prompt_ids: list[tuple[int, ...]], mode: EdgeMode
) -> None:
    """Pairs of tokens against those of the target alone: chi-square over the common ones."""
    parameters = SamplingParameters(temperature=1.2, top_k=3, max_tokens=4, ignore_eos=True)
    prompt = prompt_ids[3][:20]
    count = 1_200
    requests, others = (
        [Request(str(s), 0, prompt, replace(parameters, seed=first + s)) for s in range(count)]
        for first in (0, 10_000)
    )
    texts = Link(mode, longest=2, ahead=True).texts(requests)
    plain = [completion.token_ids for completion in run_and_close(drafting_engine(), others)]
    for first, last in ((0, 2), (1, 3), (2, 4)):
        found = [text[first:last] for text in texts], [text[first:last] for text in plain]
        pairs = [pair for pair in {*found[0], *found[1]} if sum(f.count(pair) for f in found) > 20]
        table = [[each.count(pair) for pair in pairs] for each in found]
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM
        assert np.sum(table) > count


@pytest.mark.parametrize("mode", ["ksqs", "csqs", "qs"])
def test_greedy_texts_are_the_target_s_own_in_every_mode(
    prompt_ids: list[tuple[int, ...]], mode: EdgeMode
) -> None:
    """And a guess takes the bits of its id: where nothing is drawn, no distribution is told."""
    parameters = SamplingParameters(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests = [Request(str(i), 0, prompt_ids[i][:40], parameters) for i in range(4)]
    plain = run_and_close(drafting_engine(), requests)
    link = Link(mode, ahead=True, longest=4)
    assert link.texts(requests) == [completion.token_ids for completion in plain]
    assert link.engine.statistics().draft_accepted_tokens > 30
    assert link.told == link.guesses * math.ceil(math.log2(link.engine.model.vocabulary_size))


@pytest.mark.parametrize("mode", ["same-token", "ksqs"])
def test_a_guess_that_fell_leaves_no_trace_in_what_is_guessed_later(
    prompt_ids: list[tuple[int, ...]], mode: EdgeMode
) -> None:
    """More was guessed behind it, which the draft model read as if it had been said."""
    configuration = EngineConfiguration(str(DEMO), draft=str(DEMO_DRAFT), device="cpu")
    model, fresh = (
        build_drafter(configuration, blocks=64, vocabulary_size=16_384) for _ in range(2)
    )
    for number, prompt in enumerate(prompt_ids[:8]):
        request = Request("", 0, prompt[:20], SamplingParameters(seed=number))
        drafters = [
            EdgeDrafter(each, EdgeSettings(mode), request, number, 16_384)
            for each in (model, fresh)
        ]
        said = list(request.prompt_ids)
        drafters[0].heard(len(said), goes_on=False)
        guesses = drafters[0].draft(said, 4).token_ids
        drafters[0].draft([*said, *guesses], 4)
        said += [*guesses[:2], (guesses[2] + 1_000) % 16_384]
        drafters[0].heard(len(said), goes_on=False)
        said += [301, 302, 303]
        for each in drafters:
            each.heard(len(said), goes_on=False)
        found, expected = (each.draft(said, 6) for each in drafters)
        assert found.token_ids == expected.token_ids
        assert all(map(np.array_equal, found.lattices, expected.lattices))


@pytest.mark.slow
def test_a_batch_keeps_to_its_budget_and_its_bound(prompt_ids: list[tuple[int, ...]]) -> None:
    parameters = SamplingParameters(temperature=1.0, max_tokens=60, ignore_eos=True, seed=5)
    requests = [Request(str(i), 0, prompt_ids[i][:40], parameters) for i in range(4)]
    link = Link("csqs", budget_bits=1_500)
    link.texts(requests)
    assert link.guesses > 150
    assert 700 < link.largest <= 1_500
    assert all(each.average <= each.bound for each in link.thresholds)
    assert all(each.tokens > 30 for each in link.thresholds)
    few = Link("ksqs", budget_bits=1)
    few.texts(requests[:1])
    assert few.engine.statistics().draft_tokens == few.engine.statistics().draft_steps


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"longest": 256}, "1 to 255 guesses"),
        ({"longest": 0}, "1 to 255 guesses"),
        ({"budget_bits": 0}, "above 0 bits"),
        ({"thrift": 1.1}, "from 0 to 1"),
        ({"resolution": 2_000}, "1 to 1000 parts"),
        ({"resolution": 0}, "1 to 1000 parts"),
        ({"size": 0}, "has a token"),
        ({"mode": "csqs", "alpha": 1.0}, "must be between"),
        ({"alpha": 0.0}, "must be between"),
        ({"eta": 0.0}, "must be between"),
        ({"first_threshold": 2.0}, "must be between"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EdgeSettings(**options)
