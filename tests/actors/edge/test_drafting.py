"""A small model at one end, the target at the other: the text is the target's, in few bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lexshard.actors.drafter.build import build_drafter
from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.frames import EdgeMode, FrameCodec
from lexshard.actors.edge.threshold import ConformalThreshold
from lexshard.actors.edge.verifying import drafting_of, drafts_of
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from tests.support.paths import DEMO_DRAFT
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close

FALSE_ALARM = 1e-4
SIZE = 16_000


class Link:
    """Edges whose frames reach one engine and come back, each text with a drafter of its own."""

    def __init__(self, mode: EdgeMode, **options: Any) -> None:
        self.engine: Engine = drafting_engine()
        self.codec = FrameCodec(mode, self.engine.model.vocabulary_size, size=8)
        self._options = options
        self._drafter = build_drafter(
            replace(self.engine.configuration, draft=str(DEMO_DRAFT)),
            blocks=2_000,
            vocabulary_size=self.engine.model.vocabulary_size,
        )
        self.thresholds: list[ConformalThreshold] = []
        self.bits = 0
        self.guesses = 0
        self.largest = 0  # batch of more than one guess, in bits

    def _edge(self) -> EdgeDrafter:
        threshold = None
        if self.codec.mode == "csqs":
            threshold = ConformalThreshold(0.1, 0.05, 0.02)
            self.thresholds.append(threshold)
        return EdgeDrafter(self._drafter, self.codec, threshold=threshold, **self._options)

    def texts(self, requests: list[Request]) -> list[tuple[int, ...]]:
        """What the target says to each, many of them at once."""
        edges = {request.request_id: self._edge() for request in requests}
        said: dict[str, list[int]] = {request.request_id: [] for request in requests}
        drafted: dict[str, tuple[int, ...]] = {}
        left = {request.request_id: request for request in requests}
        for request in requests:
            drafting = drafting_of(self.codec.mode)
            assert self.engine.submit(replace(request, drafting=drafting)) is None
        while left:
            for event in self.engine.step():
                name = event.request_id
                said[name].extend(event.token_ids)
                if name in drafted:
                    pairs = zip(drafted.pop(name), event.token_ids, strict=False)
                    edges[name].heard(sum(guess == token for guess, token in pairs))
                if event.finish_reason is not None:
                    del left[name]
                    continue
                batch = edges[name].draft(self._task(left[name], said[name]))
                content = self.codec.encode(batch)
                self.bits += 8 * len(content)
                self.guesses += len(batch.token_ids)
                told = sum(map(self.codec.guess_bits, batch.lattices))
                self.largest = max(self.largest, told if len(batch.token_ids) > 1 else 0)
                drafted[name] = batch.token_ids
                self.engine.draft(drafts_of(self.codec.decode(content), name, 0))
        self.engine.check_idle()
        self.engine.close()
        return [tuple(said[request.request_id]) for request in requests]

    def _task(self, request: Request, said: list[int]) -> DraftTask:
        parameters = request.parameters
        [sequence] = self.engine.sequences(request.request_id)
        return DraftTask(
            sequence.arrival,
            [*request.prompt_ids, *said],
            max(1, parameters.max_tokens - len(said)),
            sequence.state.key,
            sequence.state.inverse_temperature,
            top_k=sequence.state.top_k,
            top_p=parameters.top_p,
            min_p=parameters.min_p,
        )


def test_guesses_of_the_same_noise_change_no_token(prompt_ids: list[tuple[int, ...]]) -> None:
    requests = requests_of(prompt_ids, 16)
    plain = run_and_close(drafting_engine(), requests)
    link = Link("same-token")
    assert link.texts(requests) == [completion.token_ids for completion in plain]
    assert link.engine.statistics().draft_accepted_tokens > 100


@pytest.mark.parametrize(
    "mode",
    ["ksqs", "csqs", pytest.param("qs", marks=pytest.mark.slow)],  # qs: the whole vocabulary
)
def test_text_follows_the_target_whatever_is_left_out(
    prompt_ids: list[tuple[int, ...]], mode: EdgeMode
) -> None:
    """Pairs of tokens against those of the target alone: chi-square over the common ones."""
    parameters = SamplingParameters(temperature=1.2, top_k=6, max_tokens=3, ignore_eos=True)
    prompt = prompt_ids[3][:20]
    count = 1_200
    requests = [Request(str(s), 0, prompt, replace(parameters, seed=s)) for s in range(count)]
    texts = Link(mode, longest=2).texts(requests)
    others = [
        replace(each, parameters=replace(parameters, seed=10_000 + i))
        for i, each in enumerate(requests)
    ]
    plain = [completion.token_ids for completion in run_and_close(drafting_engine(), others)]
    tables = []
    for first, last in ((0, 2), (1, 3)):
        found = [text[first:last] for text in texts], [text[first:last] for text in plain]
        pairs = [pair for pair in {*found[0], *found[1]} if sum(f.count(pair) for f in found) > 20]
        tables.append([[each.count(pair) for pair in pairs] for each in found])
    for table in tables:
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM
        assert np.sum(table) > count


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


def test_what_does_not_fit_together_is_refused() -> None:
    drafter: Any = None
    with pytest.raises(ValueError, match="csqs alone"):
        EdgeDrafter(drafter, FrameCodec("csqs", SIZE))
    with pytest.raises(ValueError, match="csqs alone"):
        EdgeDrafter(drafter, FrameCodec("qs", SIZE), threshold=ConformalThreshold(0.1, 1, 0))
    with pytest.raises(ValueError, match="1 to 255 guesses"):
        EdgeDrafter(drafter, FrameCodec("qs", SIZE), longest=256)
