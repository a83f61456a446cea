"""A router learns where the next token is, its file is its draft's own, and what it is worth is
counted as drafting would count it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save_file

from lexshard.actors.body.batch import whole_text
from lexshard.actors.drafter.heads import frequency_head, full_head, routed_head
from lexshard.actors.drafter.router.file import FILE_NAME, RouterFileError, read_router_file
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.format import describe_weights
from lexshard.kernels.draft.types import Router
from lexshard.kernels.draw import Controls, draw
from lexshard.kernels.linear import pack
from lexshard.loadtest.draft_heads.budgets import fixed_budgets, paper_budgets, paper_budgets_of
from lexshard.loadtest.draft_heads.standing import accepted_lengths, router_scores, standing_guesses
from lexshard.loadtest.draft_heads.texts import (
    DraftPositions,
    WrittenText,
    draft_positions,
    draftable,
)
from models.recipes.router.budgets import choose_budgets
from models.recipes.router.clusters import tokens_by_frequency, vocabulary_clusters
from models.recipes.router.network import Network, fit_network
from models.recipes.router.train import main
from models.recipes.router.training import RouterSettings, Target, train_router
from tests.support.index_cases import Interrupted, Silent
from tests.support.paths import ROOT
from tests.support.router_cases import (
    WIDTH,
    TinyPair,
    router_file,
    some_positions,
)

SETTINGS = RouterSettings(
    hot=4, clusters=6, width=WIDTH, epochs=2, steps=3, share=0.6, tokens=12, temperatures=(0.0, 0.8)
)
STEPS = ["texts-0-0", "texts-1-0", "hidden states", "clusters", "network", "writing"]

# -- learning -------------------------------------------------------------------------------------


def test_a_network_learns_what_follows_from_its_inputs() -> None:
    """The cluster is a function of the token and, for half of them, of the state before."""
    random = np.random.default_rng(1)
    vectors = random.standard_normal((40, 12)).astype(np.float32)
    token, flag = random.integers(0, 40, 9000), random.integers(0, 2, 9000)
    before = random.standard_normal((9000, 12)).astype(np.float32)
    before[:, 3] += 8 * flag
    cluster = np.where(token % 2, token % 7, 7 + flag)
    wanted = np.zeros((9000, 9), np.float16)
    wanted[np.arange(9000), cluster] = 1
    train, test = slice(0, 8000), slice(8000, None)
    network, losses = fit_network(
        vectors[token[train]], before[train], wanted[train], width=32, epochs=40, seed=3
    )
    assert losses[-1] < 0.2 * losses[0]
    scores = router_scores(packed_network(network), vectors[token[test]], before[test])
    assert (scores.argmax(axis=1) == cluster[test]).mean() > 0.97
    again, _ = fit_network(
        vectors[token[train]], before[train], wanted[train], width=32, epochs=40, seed=3
    )
    assert all(map(np.array_equal, network, again))


def test_hot_tokens_are_in_no_other_cluster(pair: TinyPair) -> None:
    weight = own_rows(pair.draft).weight
    drawn = np.array([5, 5, 9, 3, 9, 5], np.int32)
    frequent = tokens_by_frequency(drawn, len(weight))
    assert frequent[:4].tolist() == [5, 9, 3, 0]
    assert sorted(frequent) == list(range(len(weight)))
    cluster_of = vocabulary_clusters(weight, frequent[:3], 6, seed=0)
    assert np.flatnonzero(cluster_of == 0).tolist() == [3, 5, 9]
    assert set(cluster_of) <= set(range(7))
    assert vocabulary_clusters(weight, frequent[:0], 6, seed=0).min() == 0


def packed_network(network: Network) -> Router:
    """The network as a draft head holds it."""
    inner, outer = (
        pack(torch.from_numpy(weight), half=False).panels
        for weight in (network.inner, network.outer)
    )
    budgets = np.ones(1, np.int32)
    return Router(inner, network.inner_bias, outer, network.outer_bias, budgets)


# -- budgets --------------------------------------------------------------------------------------


def test_the_papers_budgets() -> None:
    assert paper_budgets(64, 5) == (64, 16, 10, 8, 6)
    assert paper_budgets(3, 4) == (3, 1, 1, 1)
    assert paper_budgets(20, 1) == (20,)


def test_chosen_budgets_keep_to_the_share_and_are_worth_more_than_a_fixed_one(
    pair: TinyPair,
) -> None:
    cluster_of = np.arange(pair.size, dtype=np.int32) % 12
    positions = some_positions(pair, 400)
    head = routed_head(pair.weight, router_file(cluster_of, pair.weight.shape[1]))
    guesses = standing_guesses(head, positions, pair.size)
    for share in (0.3, 0.6):
        budgets = choose_budgets(guesses, positions.text, 4, share * pair.size)
        assert guesses.tokens(budgets) <= share * pair.size
        tokens = guesses.tokens(budgets)
        assert guesses.tokens(fixed_budgets(guesses, tokens, 4)) >= tokens
        paper = paper_budgets_of(guesses, tokens, 4)
        assert guesses.tokens(paper) >= tokens
        assert guesses.tokens(paper_budgets(paper[0] - 1, 4)) < tokens


# -- counting -------------------------------------------------------------------------------------


def test_a_guess_stands_as_if_it_had_been_drawn_from_the_shortlist(pair: TinyPair) -> None:
    """Every number of clusters at every position against the draw itself."""
    cluster_of = np.arange(pair.size, dtype=np.int32) * 7 % 6
    positions = some_positions(pair, 60)
    head = routed_head(pair.weight, router_file(cluster_of, pair.weight.shape[1]))
    assert head.router is not None
    guesses = standing_guesses(head, positions, pair.size)
    scores = router_scores(head.router, positions.embedded, positions.before)
    scores[:, 0] = -np.inf  # always looked at, never picked
    stood = 0
    for count in range(len(guesses.looked)):
        for row, stands in enumerate(guesses.stand(count)):
            picked = np.argsort(-scores[row], kind="stable")[:count]
            listed = np.flatnonzero(np.isin(cluster_of, [0, *picked])).astype(np.int32)
            assert stands == (guess(pair, positions, row, listed) == positions.drawn[row])
            stood += bool(stands)
    assert stood > 60
    sizes = np.bincount(cluster_of)
    assert guesses.looked[0] == sizes[0]
    assert guesses.looked[-1] == pair.size


def test_heads_without_a_router_have_one_answer(pair: TinyPair) -> None:
    positions = some_positions(pair, 60)
    for head, listed in (
        (full_head(pair.weight), np.arange(pair.size, dtype=np.int32)),
        (frequency_head(pair.weight, range(0, 60, 3)), np.arange(0, 60, 3, dtype=np.int32)),
    ):
        guesses = standing_guesses(head, positions, pair.size)
        assert guesses.looked.tolist() == [len(listed)]
        for row, stands in enumerate(guesses.stand(5)):
            assert stands == (guess(pair, positions, row, listed) == positions.drawn[row])


def test_accepted_guesses_are_counted_draft_by_draft() -> None:
    text = np.array([0] * 8 + [1] * 4, np.int32)
    first = np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1], bool)
    second = np.array([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0], bool)
    # Text 0: two stand at 0, then (behind the token drawn at 2) one at 3, two at 5. Text 1: none at
    # 8, two at 9. Nothing begins where two guesses no longer fit.
    assert accepted_lengths(text, [first, second]).tolist() == [2, 1, 2, 0, 2]


def test_positions_are_what_the_draft_computes_over_the_text(pair: TinyPair) -> None:
    texts = [
        WrittenText((4, 7, 1), (9, 3, 2, 8), 0.5, 11),
        WrittenText((6,), (5, 5), 0.0, 12),
        WrittenText((6, 2), (), 0.0, 13),
    ]
    positions = draft_positions(pair.body, texts)
    assert positions.tokens.tolist() == [1, 9, 3, 2, 6, 5]
    assert positions.drawn.tolist() == [9, 3, 2, 8, 5, 5]
    assert positions.place.tolist() == [3, 4, 5, 6, 1, 2]
    assert positions.text.tolist() == [0, 0, 0, 0, 1, 1]
    assert positions.key.tolist() == [11, 11, 11, 11, 12, 12]
    assert positions.inverse_temperature.tolist() == [2, 2, 2, 2, 0, 0]
    whole = pair.body.forward(whole_text((4, 7, 1, 9, 3, 2), np.arange(6, dtype=np.int32))).numpy()
    np.testing.assert_array_equal(positions.hidden[:4], whole[2:])
    np.testing.assert_array_equal(positions.before[:4], whole[1:5])
    assert not positions.before[4].any()  # nothing comes before the first token
    np.testing.assert_array_equal(positions.before[5], positions.hidden[4])


def guess(
    pair: TinyPair, positions: DraftPositions, row: int, listed: npt.NDArray[np.int32]
) -> int:
    """What the draft draws at a position from the tokens ``listed``."""
    logits = positions.hidden[row] @ pair.weight.numpy()[listed].T
    controls = Controls(
        inverse_temperature=positions.inverse_temperature[[row]],
        top_k=np.zeros(1, np.int64),
        top_p=np.ones(1),
        log_min_p=np.full(1, -np.inf),
        key=positions.key[[row]],
        position=positions.place[[row]].astype(np.uint64),
    )
    offsets = np.array([0, len(listed)], np.int64)
    return int(draw(listed, logits.astype(np.float32), offsets, controls)[0])


def target(pair: TinyPair) -> Target:
    return Target("itself", "0" * 64, pair.write)


# -- the file -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("router") / FILE_NAME
    train_router(target(pair), pair.draft, pair.prompts, out, SETTINGS, Silent())
    return out


def test_a_trained_router_is_read_as_it_was_made(pair: TinyPair, trained: Path) -> None:
    file = read_router_file(trained, describe_weights(pair.weight, None))
    assert len(file.cluster_of) == pair.size
    assert sorted(file.frequent) == list(range(pair.size))
    assert set(file.frequent[:4]) == set(np.flatnonzero(file.cluster_of == 0))
    assert file.always.tolist() == [0]
    assert len(file.budgets) == SETTINGS.steps
    assert (file.budgets >= 1).all()
    report = file.report
    assert report.hot_tokens == 4
    assert report.share["router"] <= SETTINGS.share
    assert report.share["static list"] >= report.share["router"]  # of equal size, rounded up
    assert report.accepted.keys() == report.share.keys()
    head = routed_head(pair.weight, file)
    positions = some_positions(pair, 50)
    assert head.router is not None
    scores = router_scores(head.router, positions.embedded, positions.before)
    assert (scores.argmin(axis=1) == 0).all()  # what is always looked at is never picked


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_training_goes_on_to_the_same_file(
    pair: TinyPair, trained: Path, tmp_path: Path, step: str
) -> None:
    out = tmp_path / FILE_NAME
    with pytest.raises(KeyboardInterrupt):
        train_router(target(pair), pair.draft, pair.prompts, out, SETTINGS, Interrupted(step))
    assert not out.exists()
    asked = pair.written
    train_router(target(pair), pair.draft, pair.prompts, out, SETTINGS, Silent())
    assert out.read_bytes() == trained.read_bytes()
    assert list(tmp_path.iterdir()) == [out]
    kept = [name for name in STEPS[: STEPS.index(step)] if name.startswith("texts")]
    assert pair.written - asked == 2 - len(kept)


def test_a_router_of_other_weights_is_refused(trained: Path, pair: TinyPair) -> None:
    other = describe_weights(pair.weight + 1, None)
    with pytest.raises(RouterFileError, match=r"train it again.*models.recipes.router.train"):
        read_router_file(trained, other)


def test_a_file_that_is_no_router_is_refused(trained: Path, pair: TinyPair, tmp_path: Path) -> None:
    own = describe_weights(pair.weight, None)
    with pytest.raises(RouterFileError, match="there is no router"):
        read_router_file(tmp_path / "none", own)
    content = trained.read_bytes()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content[:-9] + b"x" + content[-8:])
    with pytest.raises(RouterFileError, match="damaged"):
        read_router_file(damaged, own)
    other = tmp_path / "other"
    save_file({"ids": np.zeros(3)}, other)
    with pytest.raises(RouterFileError, match="not a router"):
        read_router_file(other, own)


def test_a_draft_that_cannot_draft_is_refused(tmp_path: Path) -> None:
    from lexshard.actors.body.loading import load
    from tests.support.tiny_models import save_tiny

    with pytest.raises(ValueError, match="fused body"):
        draftable(load(save_tiny("phi", tmp_path / "phi"), device="cpu"))


# -- the command ----------------------------------------------------------------------------------


def test_the_command_trains_from_prompts_of_ones_own(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "asked.jsonl"
    lines = [json.dumps({"token_ids": list(ids)}) for ids in pair.prompts]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "own.safetensors"
    command = [str(pair.folder), str(pair.folder), "--threads", "1"]
    options = ["--tokens", "8", "--clusters", "6", "--hot", "4", "--width", "16", "--share", "0.6"]
    assert main([*command, *options, "--prompts", str(prompts), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "asked.jsonl" in printed
    assert "clusters per step" in printed
    assert read_router_file(out, describe_weights(pair.weight, None)).report.prompts == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "nowhere"], "no model folder at nowhere"),
        (["models/lexshard-demo", "models/lexshard-demo-draft", "--prompts", "none"], "no prompts"),
    ],
)
def test_the_command_says_what_is_missing(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_router_that_ships_is_the_demo_drafts() -> None:
    from lexshard.actors.body.loading import load

    folder = ROOT / "models" / "lexshard-demo-draft"
    weight = own_rows(load(folder, device="cpu")).weight
    file = read_router_file(folder / FILE_NAME, describe_weights(weight, None))
    assert (folder / FILE_NAME).stat().st_size < 300_000
    accepted, share = file.report.accepted, file.report.share
    assert share["router"] <= 0.1
    for rival in ("static list", "router, fixed budget"):  # which look at no less
        assert share[rival] >= share["router"]
        assert accepted[rival] < accepted["router"]
    assert (np.diff(file.budgets) <= 0).all()
