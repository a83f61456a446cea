"""The demo checkpoints that ship in ``models/`` and the recipe that makes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.recipes.demo.evaluate import ended_count
from models.recipes.demo.loss import fused_cross_entropy, fused_distillation
from models.recipes.demo.network import hidden_states, rotary_table
from models.recipes.demo.recipe import DemoRecipe, Mixture
from models.recipes.demo.texts.corpus import clean_book, load_corpus
from models.recipes.demo.texts.tokenizer import render_chat
from models.recipes.demo.train import DRAFT_FOLDER, TARGET_FOLDER, main, train_demo
from tests.support.paths import ROOT

MODELS = ROOT / "models"
LARGEST_PAIR = 45_000_000
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello, it's 12:30!"},
    {"role": "assistant", "content": "Good day."},
]


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    target = AutoModelForCausalLM.from_pretrained(MODELS / TARGET_FOLDER, dtype=torch.float32)
    return target.eval(), AutoTokenizer.from_pretrained(MODELS / TARGET_FOLDER)


@pytest.fixture(scope="module")
def evaluation() -> dict[str, Any]:
    return json.loads((MODELS / TARGET_FOLDER / "evaluation.json").read_text(encoding="utf-8"))


def test_shipped_pair_is_small_and_shares_its_tokenizer(shipped: tuple[Any, Any]) -> None:
    target, tokenizer = shipped
    draft = AutoModelForCausalLM.from_pretrained(MODELS / DRAFT_FOLDER)
    other = AutoTokenizer.from_pretrained(MODELS / DRAFT_FOLDER)
    assert target.config.vocab_size == draft.config.vocab_size == 16_384
    assert len(tokenizer) == len(other) == 16_384
    assert tokenizer.get_vocab() == other.get_vocab()
    files = [
        path
        for folder in (TARGET_FOLDER, DRAFT_FOLDER)
        for path in (MODELS / folder).rglob("*")
        if path.is_file()
    ]
    assert sum(path.stat().st_size for path in files) <= LARGEST_PAIR
    stored = load_file(MODELS / TARGET_FOLDER / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}


def test_chat_template_round_trip(shipped: tuple[Any, Any]) -> None:
    _, tokenizer = shipped
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert text == render_chat(CONVERSATION)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        CONVERSATION[:2], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith(prompt)
    assert prompt.endswith("<|assistant|>\n")
    unfinished = tokenizer.apply_chat_template(
        CONVERSATION, tokenize=False, continue_final_message=True
    )
    assert unfinished == prompt + "Good day."


def test_chat_template_rejects_unknown_roles(shipped: tuple[Any, Any]) -> None:
    _, tokenizer = shipped
    with pytest.raises(TemplateError, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_tokenizer_keeps_bytes_and_splits_digits(shipped: tuple[Any, Any]) -> None:
    _, tokenizer = shipped
    text = "Zürich 2026: 東京\n\n  \t🙂 'tis"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_shipped_numbers_meet_the_floors(evaluation: dict[str, Any]) -> None:
    ended = evaluation["ended_prompts"]
    assert ended["prompts"] == 100
    assert min(ended["greedy"], ended["sampled"]) >= 90
    # Of a draft that was trained for 1,600 steps: a target of more text is harder to follow.
    assert evaluation["best_token_match_rate"]["mean"] >= 0.65
    assert evaluation["drawn_token_match_rate"]["mean"] >= 0.6
    for name in ("children", "novels", "dialogues", "all"):
        row = evaluation["bits_per_byte"][name]
        assert row["target"] < row["draft"] < row["unigram"]
    assert (
        evaluation["bits_per_byte"]["all"]["target"] < evaluation["bits_per_byte"]["all"]["xz -9e"]
    )
    assert evaluation["bits_per_byte"]["all"]["target"] < 1.2  # 1.367 with a third of the steps


def test_shipped_target_ends_its_answers(
    shipped: tuple[Any, Any], evaluation: dict[str, Any]
) -> None:
    prompts = evaluation["prompts"][:10]
    assert ended_count(*shipped, prompts, 128, sample=False) >= 9
    assert ended_count(*shipped, prompts, 128, sample=True) >= 8


def test_network_equals_transformers(shipped: tuple[Any, Any]) -> None:
    target, tokenizer = shipped
    shape = DemoRecipe().target
    tokens = tokenizer("The king said to the wolf:", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ours = hidden_states(
            target.state_dict(), shape, tokens, rotary_table(shape, tokens.shape[1])
        )
        theirs = target.model(tokens).last_hidden_state[0]
    assert torch.allclose(ours, theirs, atol=1e-4)


def same_with_gradients(loss: torch.Tensor, expected: torch.Tensor, *of: torch.Tensor) -> None:
    assert torch.allclose(loss, expected, rtol=1e-12)
    ours, theirs = (torch.autograd.grad(3 * each, of) for each in (loss, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("with_bias", [False, True])
def test_fused_cross_entropy_equals_torch(with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(70, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(70, (600,), generator=generator)
    bias = torch.randn(70, generator=generator, dtype=torch.float64) if with_bias else None
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    loss = fused_cross_entropy(hidden, weight, targets, bias)
    same_with_gradients(loss, expected, hidden, weight)


def test_fused_distillation_equals_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    taught = torch.randn(300, 10, generator=generator, dtype=torch.float64)
    teacher = torch.randn(50, 10, generator=generator, dtype=torch.float64)
    wanted = (taught @ teacher.t()).softmax(1)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), wanted, reduction="sum")
    loss = fused_distillation(hidden, weight, taught, teacher)
    same_with_gradients(loss, expected, hidden, weight)


def test_clean_book_keeps_prose_only() -> None:
    prose = "The old man walked slowly down to the sea. " * 6
    front = "THE TITLE\n\nby\n\nAn Author\n\nCHAPTER I."
    book = f"{front}\n\n{prose}\n\nA verse\nof two lines.\n\n“Yes,” he said."
    assert clean_book(book) == [prose.strip(), '"Yes," he said.']


def test_held_out_texts_are_not_trained_on(texts: Path) -> None:
    corpus = load_corpus(texts, Mixture(held_out_books=1))
    assert len(corpus.prose["prose"]) == 3
    assert len(corpus.held_out_prose["prose"]) == 1
    assert {dialogue.identity.split("/")[0] for dialogue in corpus.dialogues} == {"train"}
    assert len(corpus.held_out_dialogues) == 60


@pytest.fixture(scope="module")
def made(
    texts: Path, recipe: DemoRecipe, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """What the recipe tells of a tiny pair, and the pair's folder."""
    out = tmp_path_factory.mktemp("made") / "out"
    return train_demo(texts, out, 5, recipe=recipe), out


def test_whole_recipe_makes_a_loadable_pair(
    made: tuple[dict[str, Any], Path], recipe: DemoRecipe
) -> None:
    result, out = made
    assert 0 < result["bits_per_byte"]["all"]["target"] < 8
    assert result["training"]["draft"]["steps"] == recipe.draft_schedule.steps
    measured = result["training"]["target"]["held_out_bits_per_byte"]
    assert result["bits_per_byte"]["all"]["target"] == min(measured.values())
    assert set(measured) == {"last", "average"}
    for folder in (TARGET_FOLDER, DRAFT_FOLDER):
        model = AutoModelForCausalLM.from_pretrained(out / folder)
        assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(out / folder))


def test_samples_are_of_every_kind_in_both_modes_and_ready_for_the_card(
    made: tuple[dict[str, Any], Path], recipe: DemoRecipe
) -> None:
    result, out = made
    written = result["samples"]
    kinds = [(sample["kind"], sample["mode"]) for sample in written]
    assert kinds == [
        (kind, mode)
        for kind in ("prose", "dialogues")
        for mode in ("greedy", "sampled")
        for _ in range(recipe.measurement.sample_prompts)
    ]
    assert DemoRecipe().measurement.sample_prompts * 3 * 2 == 60  # with stories and novels
    card = (out / TARGET_FOLDER / "samples.md").read_text(encoding="utf-8")
    for sample in written:
        assert f"{sample['prompt']}⟶{sample['answer']}" in card
    assert card.count("### ") == 4


def test_a_finished_target_is_kept_and_gets_a_new_draft(
    made: tuple[dict[str, Any], Path], texts: Path, recipe: DemoRecipe, tmp_path: Path
) -> None:
    first, out = made
    other_draft = replace(recipe, draft_schedule=replace(recipe.draft_schedule, adam_rate=1e-3))
    target = out / TARGET_FOLDER
    again = train_demo(texts, tmp_path / "again", 5, recipe=other_draft, trained=target)
    assert again["training"]["target"] == first["training"]["target"]
    for folder, same in ((TARGET_FOLDER, True), (DRAFT_FOLDER, False)):
        weights = [run / folder / "model.safetensors" for run in (out, tmp_path / "again")]
        assert (weights[0].read_bytes() == weights[1].read_bytes()) is same
    with pytest.raises(ValueError, match="another tokenizer"):
        train_demo(texts, tmp_path / "third", 6, recipe=recipe, trained=target)


def test_command_refuses_a_target_that_is_none_or_would_be_trained(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(texts), "--out", str(tmp_path / "out"), "--target", str(tmp_path)]
    for option in (["--target-tokens", "4096"], ["--decay-now", "0.4"]):
        assert main([*given, *option]) == 1
        assert "leave --target-tokens and --decay-now out" in capsys.readouterr().err
    assert main(given) == 1
    assert "evaluation.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_command_reports_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "no .txt" in capsys.readouterr().err
