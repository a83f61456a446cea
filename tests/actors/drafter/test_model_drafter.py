"""The draft model's guesses: those of a plain loop over transformers, whatever came before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.actors.body.loading import LoadedModel, load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.build import drafter_of
from lexshard.actors.drafter.draft_cache import MOST_PENDING
from lexshard.actors.drafter.model import ModelDrafter
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.drafter.step_heads import WholeHead, certified_head
from lexshard.actors.drafter.stepwise import StepwiseDrafter
from lexshard.actors.drafter.task import DraftTask
from lexshard.kernels.noise import gumbel_noise
from lexshard.kernels.truncate import truncate
from tests.support.draft_cases import full_head, guessed, model_drafter, routed_head
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.quick import quick

KEYS = (0, 2**64 - 1, 123456789)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(DEMO_DRAFT, "float32", device="cpu")


@pytest.fixture(scope="module")
def plain() -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(DEMO_DRAFT, dtype=torch.float32)
    return found.eval()


def plain_guesses(plain: Any, task: DraftTask, ids: np.ndarray) -> list[int]:
    """Token after token through the whole model, drawn from every row of ``ids``."""
    tokens = list(task.history)
    for _ in range(task.most):
        with torch.inference_mode():
            row = plain(input_ids=torch.tensor([tokens])).logits[0, -1].double().numpy()[ids]
        noise = gumbel_noise(task.key, len(tokens), ids).astype(np.float64)
        scale = task.inverse_temperature
        if task.truncates:
            keep = truncate(
                row.astype(np.float32),
                inverse_temperature=scale,
                top_k=task.top_k,
                top_p=task.top_p,
                min_p=task.min_p,
            )
            row = np.where(keep, row, -np.inf)
        tokens.append(int(ids[np.argmax(row * scale + noise if scale else row)]))
    return tokens[len(task.history) :]


def tasks_of(prompt_ids: list[tuple[int, ...]], count: int, most: int = 4) -> list[DraftTask]:
    return [
        DraftTask(
            sequence,
            list(prompt_ids[sequence][: 3 + 13 * sequence]),
            most - sequence % 3,
            KEYS[sequence % 3],
            (0.0, 1.0, float(np.float32(1 / 0.7)))[sequence % 3],
            top_k=(0, 0, 0, 0, 40, 0, 3)[sequence % 7],
            top_p=(1.0, 1.0, 0.9, 1.0, 0.95)[sequence % 5],
            min_p=(0.0, 0.0, 0.0, 0.1)[sequence % 4],
        )
        for sequence in range(count)
    ]


def stepwise_drafter(model: LoadedModel) -> StepwiseDrafter:
    general = load(DEMO_DRAFT, "float32", body="general", device="cpu").body
    head = WholeHead(model.head, model.vocabulary_size)
    return StepwiseDrafter(general, head, blocks=64)


def certified_drafter(model: LoadedModel, vocabulary_size: int | None = None) -> StepwiseDrafter:
    """Its own model, whose cache the making of an index would take."""
    size = vocabulary_size or model.vocabulary_size
    configuration = EngineConfiguration(str(DEMO), draft=str(DEMO_DRAFT), device="cpu")
    own = load(DEMO_DRAFT, "float32", body="fused", device="cpu")
    head = certified_head(configuration, own, size)
    return StepwiseDrafter(own.body, head, blocks=64)


DRAFTERS: dict[str, Callable[[LoadedModel], Drafter]] = {
    "native": model_drafter,
    "stepwise": stepwise_drafter,
    "certified": certified_drafter,
}


@pytest.mark.parametrize("kind", quick(DRAFTERS, "native", "stepwise"))
def test_guesses_are_those_of_the_plain_model(
    model: LoadedModel, plain: Any, prompt_ids: list[tuple[int, ...]], kind: str
) -> None:
    tasks = tasks_of(prompt_ids, 9)
    expected = [plain_guesses(plain, task, np.arange(model.vocabulary_size)) for task in tasks]
    assert guessed(DRAFTERS[kind](model), tasks) == expected


@pytest.mark.parametrize("kind", ["stepwise", "certified"])
def test_a_nucleus_is_taken_once(
    model: LoadedModel, plain: Any, prompt_ids: list[tuple[int, ...]], kind: str
) -> None:
    """What a certified head gives for top-p is the nucleus; half of that would be another."""
    tasks = [DraftTask(n, [*prompt_ids[n][:20]], 1, 100 + n, 0.6, top_p=0.5) for n in range(20)]
    expected = [plain_guesses(plain, task, np.arange(model.vocabulary_size)) for task in tasks]
    assert guessed(DRAFTERS[kind](model), tasks) == expected


def test_a_static_list_is_drawn_from_alone(
    model: LoadedModel, plain: Any, prompt_ids: list[tuple[int, ...]]
) -> None:
    ids = np.sort(np.random.default_rng(0).permutation(model.vocabulary_size)[:3000])
    tasks = tasks_of(prompt_ids, 6)
    drafter = model_drafter(model, full_head(model, ids))
    assert guessed(drafter, tasks) == [plain_guesses(plain, task, ids) for task in tasks]


@pytest.fixture(scope="module", params=["native", "routed", "stepwise", "certified"])
def pair(request: pytest.FixtureRequest, model: LoadedModel) -> tuple[Any, Any]:
    """Two drafters of a kind."""
    if request.param in ("stepwise", "certified"):
        return DRAFTERS[request.param](model), DRAFTERS[request.param](model)
    head = full_head(model)
    if request.param == "routed":
        head = routed_head(model, 1, 40, [9, 6, 2])
    return model_drafter(model, head), model_drafter(model, head)


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_what_was_accepted_or_not_leaves_no_trace(
    pair: tuple[Any, Any], data: st.DataObject
) -> None:
    """After any run of acceptances, rejections, pauses and repeated questions, the guesses are
    those of a drafter that sees the history for the first time, to the last bit."""
    drafter, fresh = pair
    for name in range(3):  # what an example that failed left
        drafter.forget(name)
    histories = {
        name: data.draw(st.lists(st.integers(0, 16_000), min_size=1, max_size=40), f"{name}")
        for name in range(3)
    }
    for _ in range(6):
        tasks = [
            DraftTask(name, histories[name], data.draw(st.integers(0, 5)), 5 + name, 1.0 * name)
            for name in data.draw(st.permutations(range(3)))
        ]
        found = guessed(drafter, tasks)
        for task in tasks:
            fresh.forget(task.sequence)
        assert guessed(fresh, tasks) == found
        for task, guesses in zip(tasks, found, strict=True):
            assert len(guesses) == task.most
            kept = data.draw(st.integers(-1, len(guesses)))
            if kept >= 0:
                histories[task.sequence] += [*guesses[:kept], data.draw(st.integers(0, 16_000))]
    for name in range(3):
        drafter.forget(name)
    drafter._cache.check()
    assert drafter._cache.used == 0


def test_guesses_that_were_read_and_fell_leave_no_trace(
    pair: tuple[Any, Any], prompt_ids: list[tuple[int, ...]]
) -> None:
    """As those of a device, which guesses on behind them before it hears of them."""
    drafter, fresh = pair
    for number, stand in enumerate((0, 2, 4)):
        said = list(prompt_ids[number][:20])
        for following in ([5], [*range(5, 15)], [5]):
            task = DraftTask(number, said, 4, number, 1.0, propose=True)
            [guesses] = guessed(drafter, [task])
            behind = replace(task, history=[*said, *guesses], ahead=4)
            [more] = guessed(drafter, [behind])
            guessed(drafter, [replace(behind, history=[*behind.history, *more[:2]], ahead=6)])
            said = [*said, *guesses[:stand], *following]
            fresh.forget(number)
            found, expected = (each.propose([replace(task, history=said)])[0] for each in pair)
            assert found.token_ids == expected.token_ids
            for one, other in zip(found.proposals, expected.proposals, strict=True):
                assert np.allclose(one.logits, other.logits, atol=1e-3)
        for each in pair:
            each.forget(number)


def test_a_guess_does_not_depend_on_the_batch(
    model: LoadedModel, prompt_ids: list[tuple[int, ...]]
) -> None:
    tasks = tasks_of(prompt_ids, 12)
    together = guessed(model_drafter(model, blocks=256), tasks)
    alone = model_drafter(model)
    for task, guesses in zip(tasks, together, strict=True):
        assert guessed(alone, [task]) == [guesses]
        alone.forget(task.sequence)


def test_a_long_prompt_is_caught_up_with_in_pieces(
    model: LoadedModel, plain: Any, prompt_ids: list[tuple[int, ...]]
) -> None:
    history = [token for ids in prompt_ids for token in ids][: 2 * MOST_PENDING + 100]
    task = DraftTask(0, history, 2, 7, 1.0)
    drafter = model_drafter(model, blocks=100)
    drafts = [drafter.propose([task])[0] for _ in range(4)]
    expected = plain_guesses(plain, task, np.arange(model.vocabulary_size))
    assert [list(each.token_ids) for each in drafts] == [[], [], expected, expected]
    assert [each.reads for each in drafts] == [True, True, False, False]
    other = replace(task, sequence=1, history=history[:100])
    assert [each.reads for each in drafter.propose([replace(task, sequence=2), other])] == [
        True,
        False,
    ]


def test_a_history_beyond_the_models_positions_gets_no_guess(model: LoadedModel) -> None:
    drafter = model_drafter(model, blocks=200)
    history = [5] * (model.max_positions - 1)
    task = DraftTask(0, history, 5, 7, 1.0)
    while not (found := guessed(drafter, [task])[0]):
        pass
    assert len(found) == 2  # the last one stands at the first position too many
    history += [6, 6]
    assert guessed(drafter, [task]) == [[]]


def test_without_room_a_sequence_is_not_drafted_for(
    model: LoadedModel, prompt_ids: list[tuple[int, ...]]
) -> None:
    tasks = [DraftTask(name, list(prompt_ids[name][:40]), 3, 7, 1.0) for name in range(4)]
    expected = guessed(model_drafter(model), tasks)
    drafter = model_drafter(model, blocks=7)  # two sequences of three blocks
    drafts = drafter.propose(tasks)
    found = [list(each.token_ids) for each in drafts]
    assert not any(each.reads for each in drafts)
    assert [bool(guesses) for guesses in found] == [True, True, False, False]
    assert found[:2] == expected[:2]
    assert guessed(drafter, tasks[2:]) == expected[2:]  # the others make room
    assert guessed(drafter, [tasks[0], tasks[2]]) == [expected[0], expected[2]]


def test_padding_is_never_guessed(model: LoadedModel) -> None:
    """Rows that the target's tokenizer has no token for, whatever their logits."""
    size = model.vocabulary_size - 9000
    small = ModelDrafter(one_body(model), full_head(model), blocks=8, vocabulary_size=size)
    tasks = [DraftTask(name, [1, 2, 3], 5, name, 0.2, propose=name > 5) for name in range(8)]
    assert max(max(guesses) for guesses in guessed(model_drafter(model), tasks)) >= size
    for drafter in (small, certified_drafter(model, size)):
        drafts = drafter.propose(tasks)
        assert max(max(draft.token_ids) for draft in drafts) < size
        assert all(each.ids.max() < size for draft in drafts for each in draft.proposals)


def one_body(model: LoadedModel) -> Any:
    return load(DEMO_DRAFT, "float32", body="fused", device="cpu").body


@pytest.mark.parametrize("head", ["full", "static", "router", "certified"])
def test_a_draft_model_with_fewer_tokens_than_the_target_is_refused(
    model: LoadedModel, head: Any
) -> None:
    configuration = EngineConfiguration(str(DEMO), draft=str(DEMO_DRAFT), draft_head=head)
    with pytest.raises(ValueError, match="has 16384 of 16400 tokens: use one that was made for"):
        drafter_of(model, configuration, blocks=8, vocabulary_size=16_400)


@pytest.mark.parametrize("kind", ["static", "routed", "stepwise", "certified"])
def test_a_guess_was_drawn_from_its_proposal(
    model: LoadedModel, prompt_ids: list[tuple[int, ...]], kind: str
) -> None:
    """The best token with the noise of its place added, of the very logits."""
    if kind in DRAFTERS:
        drafter = DRAFTERS[kind](model)
    else:
        head = routed_head(model, 1, 40, [9, 6, 2]) if kind == "routed" else full_head(model)
        drafter = model_drafter(model, head)
    tasks = [replace(task, propose=task.sequence % 4 > 0) for task in tasks_of(prompt_ids, 8)]
    for task, draft in zip(tasks, drafter.propose(tasks), strict=True):
        assert len(draft.proposals) == (len(draft.token_ids) if task.propose else 0)
        for place, proposal in enumerate(draft.proposals, len(task.history)):
            assert len(set(proposal.ids.tolist())) == len(proposal.ids)
            noise = gumbel_noise(task.key, place, proposal.ids).astype(np.float64)
            scores = proposal.logits.astype(np.float64) * (task.inverse_temperature or 1.0)
            scores += noise if task.inverse_temperature else 0.0
            drawn = proposal.ids[int(np.argmax(scores))]
            assert drawn == draft.token_ids[place - len(task.history)]
            assert proposal.inverse_temperature == task.inverse_temperature
