"""Guesses are computed, verified and taken back; they change when tokens come, never which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.configuration import EngineConfiguration
from actors.engine.completion import Completion, run_to_completion
from actors.engine.engine import Engine
from actors.engine.scheduler import Scheduler
from actors.engine.sequence import Sequence as EngineSequence
from actors.kv_cache import BLOCK_TOKENS, BlockPool, block_hash
from actors.messages import Request, SamplingParameters
from cluster.samplers.start import start_sampler
from tests.support.paths import DEMO

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


class Guesses:
    """A drafter that knows what is to come and says it, or something else, at random."""

    def __init__(self, truth: dict[tuple[int, ...], tuple[int, ...]], share: float) -> None:
        self._truth = truth
        self._share = share
        self._random = np.random.default_rng(7)
        self.right = 0
        self.wrong = 0

    def propose(
        self, sequences: Sequence[int], histories: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        return [self._guess(tuple(history)) for history in histories]

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
        kind = KINDS[index % len(KINDS)]
        fields = {name: getattr(kind, name) for name in kind.__slots__}
        fields |= {
            "max_tokens": int(random.integers(1, 30)),
            "seed": int(random.integers(0, 2**63)),
            "ignore_eos": index % 3 != 0,
            "stop_token_ids": tuple(random.integers(0, 2000, 40).tolist()),
        }
        prompt = (index + 20, *prompt_ids[index][:60])
        requests.append(Request(str(index), 0, prompt, SamplingParameters(**fields)))
    return requests


def _engine(drafter: Guesses | None, **changes: Any) -> Engine:
    configuration = EngineConfiguration(
        str(DEMO), dtype="float32", device="cpu", threads=1, max_model_len=128, **changes
    )
    return Engine(configuration, start_sampler, drafter)


def _run(engine: Engine, requests: list[Request]) -> list[Completion]:
    try:
        completions = run_to_completion(engine, requests)
        engine.check_idle()
        return completions
    finally:
        engine.close()


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 24)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    return _run(_engine(None), requests)


@pytest.fixture(scope="module")
def truth(plain: list[Completion]) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {each.prompt_ids: each.token_ids for each in plain}


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_guesses_of_any_quality_change_no_token(
    requests: list[Request], plain: list[Completion], truth: dict, share: float
) -> None:
    """Tokens, reasons and log-probabilities are those without a drafter, to the last bit."""
    drafter = Guesses(truth, share)
    engine = _engine(drafter)
    assert _run(engine, requests) == plain
    assert drafter.right + drafter.wrong > 150


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_bytes": 12},  # blocks
        {"prefix_cache": False, "step_tokens": 24},
        {"samplers": 2, "sampler_placement": "threads"},
        {"samplers": 2, "sampler_placement": "processes"},
        {"head": "dense"},
    ],
    ids=["little room", "small steps", "sampler threads", "sampler processes", "dense head"],
)
def test_nor_do_they_however_the_engine_is_run(
    requests: list[Request], plain: list[Completion], truth: dict, changes: dict[str, Any]
) -> None:
    if "kv_cache_bytes" in changes:
        bytes_per_block = _engine(None).model.body.kv_bytes_per_block()
        changes = {"kv_cache_bytes": changes["kv_cache_bytes"] * bytes_per_block}
    engine = _engine(Guesses(truth, 0.7), **changes)
    assert _run(engine, requests) == plain
    if "kv_cache_bytes" in changes:
        assert engine.statistics().preemptions > 0


def test_right_guesses_save_steps(
    requests: list[Request], plain: list[Completion], truth: dict
) -> None:
    """What is guessed right needs no step of its own."""
    steps = {}
    for share in (0.0, 1.0):
        engine = _engine(Guesses(truth, share))
        assert _run(engine, requests) == plain
        steps[share] = engine.statistics().steps
    assert steps[1.0] < 0.6 * steps[0.0]


# -- keys, values and names ------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(8, 30),
    step_tokens=st.integers(4, 48),
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    data=st.data(),
)
def test_no_block_that_holds_a_guess_has_a_name(
    blocks: int, step_tokens: int, prompts: list[int], data: st.DataObject
) -> None:
    """Under any acceptance, preemption included: named blocks are those of committed tokens, what
    is computed never lies beyond them after a step, and every block comes back."""
    pool = BlockPool(blocks)
    scheduler = Scheduler(pool, step_tokens=step_tokens, max_running=4)
    for arrival, length in enumerate(prompts):
        request = Request(str(arrival), 0, (arrival,) * length, SamplingParameters(max_tokens=20))
        scheduler.add(EngineSequence(request, arrival, cast(Any, None), list(request.prompt_ids)))
    steps = 0
    while not scheduler.idle:
        for sequence in scheduler.drawing():
            room = 20 - sequence.output_length - 1
            sequence.drafted = [7] * min(data.draw(st.integers(0, 5)), room)
        plan = scheduler.plan()
        assert plan.tokens <= step_tokens
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert len(sequence.blocks) * BLOCK_TOKENS >= chunk.start + chunk.count
            sequence.advance(chunk.count, pool)
            if not chunk.draws:
                continue
            assert chunk.draws == len(chunk.drafted) + 1
            length = len(sequence.token_ids)
            matched = data.draw(st.integers(0, len(chunk.drafted)))
            sequence.token_ids.extend([7] * matched + [8])
            sequence.roll_back(length + matched, pool)
            assert sequence.computed == len(sequence.token_ids) - 1
            name = b""
            for index, known in enumerate(sequence.names):
                tokens = sequence.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
                name = block_hash(name, tokens)
                assert len(tokens) == BLOCK_TOKENS
                assert known == name
            if sequence.output_length >= 20:
                scheduler.remove(sequence)
        pool.check()
        steps += 1
        assert steps < 5_000
    assert pool.used == 0
