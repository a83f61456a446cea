"""The demo's training in pieces: stopped and gone on with, ended early, averaged."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.recipes.demo import train
from models.recipes.demo.network import NetworkWeights, initial_weights
from models.recipes.demo.pieces import Piece, UnfinishedError, read_state
from models.recipes.demo.recipe import DemoRecipe, Schedule
from models.recipes.demo.stages import Stage, train_target
from models.recipes.demo.texts.corpus import load_corpus
from models.recipes.demo.texts.prepare import Prepared, prepare
from models.recipes.demo.texts.windows import TokenSource, window_starts
from models.recipes.demo.trainer import Trainer, next_token_loss

SEED = 3


class StepsPiece(Piece):
    """Over after some steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps + 1

    def over(self) -> bool:
        self._left -= 1
        return self._left <= 0


@pytest.fixture
def prepared(texts: Path, recipe: DemoRecipe, tmp_path: Path) -> Prepared:
    return prepare(load_corpus(texts, recipe.mixture), tmp_path, tmp_path, recipe, SEED)


def trainer_of(prepared: Prepared, recipe: DemoRecipe) -> Trainer:
    return Trainer(recipe.target, recipe.target_schedule, prepared, SEED, recipe.workers)


def gone_on(trainer: Trainer, path: Path, piece: Piece) -> bool:
    state = read_state(path, trainer.made_by)
    if state is not None:
        trainer.restore(state)
    return trainer.run("target", path, 1e9, piece)


def equal(first: NetworkWeights, second: NetworkWeights) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def trained(
    prepared: Prepared,
    recipe: DemoRecipe,
    state: Path,
    piece: Piece | None = None,
    decay_now: float | None = None,
) -> Stage:
    """Trained with a measure that likes small weights."""

    def bits(weights: NetworkWeights) -> float:
        return float(sum(value.norm() for value in weights.values()))

    state.mkdir(exist_ok=True)
    return train_target(prepared, recipe, state, SEED, piece or Piece(), bits, decay_now)


def test_schedule_warms_up_stays_and_decays() -> None:
    schedule = Schedule(tokens=100 * 4_096, warmup_steps=10, decay_fraction=0.2)
    assert schedule.steps == 100
    assert schedule.decay_start == 80
    assert schedule.rate_factor(0) == pytest.approx(0.1)
    assert schedule.rate_factor(49) == schedule.rate_factor(80) == 1.0
    assert schedule.rate_factor(90) == pytest.approx(0.5)
    assert schedule.rate_factor(99) == pytest.approx(0.05)


@pytest.mark.parametrize("step", [1, 7, 30, 59])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.75])
def test_a_schedule_ended_early_decays_from_there(step: int, share: float) -> None:
    schedule = Schedule(tokens=100 * 4_096, warmup_steps=1)
    early = schedule.ended_early(step, share)
    assert [early.rate_factor(each) for each in range(step)] == [1.0] * step
    assert early.rate_factor(early.steps - 1) == 1 / (early.steps - early.decay_start)
    assert early.steps - step == pytest.approx(share * early.steps, abs=1)


def test_average_reaches_back_over_its_share_of_the_steps() -> None:
    schedule = Schedule(tokens=1_000 * 4_096, average_fraction=0.1)
    average, weight_of = 0.0, np.zeros(1_000)
    for step in range(1_000):
        rate = schedule.average_rate(step)
        average += rate * (step - average)
        weight_of *= 1 - rate
        weight_of[step] = rate
    assert weight_of.sum() == pytest.approx(1.0)
    assert average == pytest.approx(1_000 * (1 - 0.1 / 1.1), rel=0.01)


def test_windows_leave_no_text_unread() -> None:
    lengths = np.random.default_rng(0).integers(20, 100, 200)
    starts = np.cumsum([0, *lengths])[:-1]
    source = TokenSource("text", 1.0, np.arange(lengths.sum()), starts)
    windows = window_starts(source, 100)
    assert set(windows) <= set(starts)
    assert np.all(np.diff(windows) <= 100)
    assert len(source.tokens) - windows[-1] <= 201


@pytest.mark.parametrize("stops", [(1, 1), (3, 4), (5, 0)])
def test_training_stopped_twice_is_training_in_one(
    prepared: Prepared, recipe: DemoRecipe, tmp_path: Path, stops: tuple[int, int]
) -> None:
    whole, part = trainer_of(prepared, recipe), trainer_of(prepared, recipe)
    assert gone_on(whole, tmp_path / "whole.pt", Piece())
    for steps in stops:
        assert not gone_on(part, tmp_path / "part.pt", StepsPiece(steps))
        part = trainer_of(prepared, recipe)
    assert gone_on(part, tmp_path / "part.pt", Piece())
    assert part.losses == whole.losses
    assert len(whole.losses) == recipe.target_schedule.steps
    assert equal(part.weights, whole.weights)
    assert equal(part.average, whole.average)
    assert not equal(whole.weights, initial_weights(recipe.target, SEED))


def test_tokens_made_anew_from_a_kept_state_are_the_same(
    texts: Path, recipe: DemoRecipe, tmp_path: Path
) -> None:
    """The state alone moves to another machine."""
    corpus = load_corpus(texts, recipe.mixture)
    state, works = tmp_path / "state", [tmp_path / "first", tmp_path / "second"]
    for folder in (state, *works):
        folder.mkdir()
    first, second = (prepare(corpus, state, work, recipe, SEED) for work in works)
    with pytest.raises(UnfinishedError, match="after step 3 of 8"):
        trained(first, recipe, state, StepsPiece(3))
    whole = trained(first, recipe, tmp_path / "whole")
    assert equal(trained(second, recipe, state).weights, whole.weights)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_piece_after_its_step(
    prepared: Prepared, recipe: DemoRecipe, tmp_path: Path, told: signal.Signals
) -> None:
    def loss(*given: torch.Tensor) -> torch.Tensor:
        if trainer.step == 2:
            os.kill(os.getpid(), told)
        return next_token_loss(*given)

    trainer = Trainer(recipe.target, recipe.target_schedule, prepared, SEED, recipe.workers, loss)
    handler = signal.getsignal(told)
    assert not gone_on(trainer, tmp_path / "state.pt", Piece())
    assert signal.getsignal(told) == handler
    state = read_state(tmp_path / "state.pt", trainer.made_by)
    assert state is not None
    assert len(state["losses"]) == 3


def test_a_state_of_another_recipe_is_refused(
    prepared: Prepared, recipe: DemoRecipe, tmp_path: Path
) -> None:
    with pytest.raises(UnfinishedError):
        trained(prepared, recipe, tmp_path, StepsPiece(1))
    schedule = replace(recipe.target_schedule, muon_rate=0.5)
    with pytest.raises(ValueError, match=r"another recipe: schedule.muon_rate was 0.02, is 0.5$"):
        trained(prepared, replace(recipe, target_schedule=schedule), tmp_path)
    with pytest.raises(ValueError, match="another recipe: texts was"):
        trained(replace(prepared, digest="other"), recipe, tmp_path)


def test_a_run_ended_early_is_whole_after_its_decay(
    prepared: Prepared, recipe: DemoRecipe, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="nothing to end"):
        trained(prepared, recipe, tmp_path, decay_now=0.5)
    with pytest.raises(UnfinishedError):
        trained(prepared, recipe, tmp_path, StepsPiece(2))
    with pytest.raises(UnfinishedError, match="after step 3 of 4"):
        trained(prepared, recipe, tmp_path, StepsPiece(1), decay_now=0.5)
    with pytest.raises(UnfinishedError, match="after step 3 of 4"):
        trained(prepared, recipe, tmp_path, StepsPiece(0), decay_now=0.9)
    stage = trained(prepared, recipe, tmp_path)
    assert (stage.steps, stage.schedule["decay_fraction"]) == (4, 0.5)


def test_the_budget_may_change_until_the_final_decay_begins(
    prepared: Prepared, recipe: DemoRecipe, tmp_path: Path
) -> None:
    longer = recipe.with_tokens(12 * 256, None)
    with pytest.raises(UnfinishedError, match="after step 3 of 8"):
        trained(prepared, recipe, tmp_path / "changed", StepsPiece(3))
    with pytest.raises(UnfinishedError, match="after step 8 of 12"):
        trained(prepared, longer, tmp_path / "changed", StepsPiece(5))
    changed = trained(prepared, recipe, tmp_path / "changed")
    planned = trained(prepared, longer, tmp_path / "planned")
    assert changed.steps == 12
    assert equal(changed.weights, planned.weights)


def test_weights_that_measure_better_are_kept_and_measured_once(
    prepared: Prepared, recipe: DemoRecipe, tmp_path: Path
) -> None:
    trainer = trainer_of(prepared, recipe)
    assert gone_on(trainer, tmp_path / "target.pt", Piece())
    for better, weights in (("last", trainer.weights), ("average", trainer.average)):
        state = tmp_path / better
        state.mkdir()
        bits = iter([1.0, 2.0] if better == "last" else [2.0, 1.0])
        for _ in range(2):
            stage = train_target(
                prepared, recipe, state, SEED, Piece(), lambda _, bits=bits: next(bits)
            )
            assert equal(stage.weights, weights)
            assert min(stage.held_out_bits, key=stage.held_out_bits.__getitem__) == better


def test_command_stops_after_its_minutes_and_goes_on(
    texts: Path,
    recipe: DemoRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "DemoRecipe", lambda: recipe)
    given = ["--data", str(texts), "--out", str(tmp_path), "--state", str(tmp_path / "kept")]
    assert train.main([*given, "--minutes", "0"]) == train.STOPPED
    assert "step 0 of 8; the same command goes on" in capsys.readouterr().err
    assert train.main([*given, "--minutes", "10"]) == 0
    told = capsys.readouterr()
    assert "target: step 8 of 8, loss " in told.err
    assert " tokens/s, 0 h 00 min left" in told.err
    assert "bits per byte" in told.out
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "draft.pt",
        "target.pt",
        "tokenizer.json",
    ]
