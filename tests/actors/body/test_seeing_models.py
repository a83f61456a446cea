"""A checkpoint of a model that also sees is served as the model of text that is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from lexshard.actors.body import loading
from lexshard.actors.body.fused import FusedBody
from lexshard.actors.body.loading import check_before_weights, load
from lexshard.actors.body.parallel.checks import check_folder_shared
from lexshard.actors.body.parallel.loading import ParallelOptions, load_parallel
from lexshard.actors.body.proven import is_to_prove, recall_proven
from lexshard.actors.body.self_test import run_alone
from tests.support.parallel_cases import OF_FAMILY, SHARED
from tests.support.thread_ranks import ThreadRanks
from tests.support.tiny_models import SERVED, VOCABULARY

TOKENS = [[3 + (7 * place) % 90 for place in range(30)], [5, 9, 2, 44]]


def save_seeing(folder: Path) -> Gemma3ForConditionalGeneration:
    """A tiny Gemma 3 with eyes."""
    text = {**SERVED["gemma3_text"][1], **SHARED, **OF_FAMILY["gemma3_text"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=4
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model


def rename(folder: Path, old: str, new: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    assert any(name.startswith(old) for name in weights)
    renamed = {
        new + name.removeprefix(old) if name.startswith(old) else name: weight
        for name, weight in weights.items()
    }
    save_file(renamed, file, {"format": "pt"})


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_its_text_is_computed_as_it_computes_it(prefix: str, tmp_path: Path) -> None:
    """By the fused body, remembered and not, and by several ranks; under both names there are."""
    model = save_seeing(tmp_path)
    if prefix != "language_model.model.":
        rename(tmp_path, "language_model.model.", prefix)
    expected = [
        model(input_ids=torch.tensor([tokens])).logits[0].detach()[:, :VOCABULARY]
        for tokens in TOKENS
    ]
    check_folder_shared(tmp_path, 2)
    first = load(tmp_path, "float32", device="cpu")
    assert recall_proven(tmp_path, "float32", "auto") is not None
    second = load(tmp_path, "float32", device="cpu")
    shared = load_parallel(tmp_path, ParallelOptions(2, "float32"), ThreadRanks)
    general = load_parallel(tmp_path, ParallelOptions(1, "float32", "general"), None)
    assert isinstance(first.body, FusedBody)
    for loaded in (first, second, shared, general):
        for hidden, logits in zip(run_alone(loaded.body, TOKENS), expected, strict=True):
            ours = loaded.head.logits(hidden)[:, :VOCABULARY]
            assert float((ours - logits).abs().max()) < 1e-4 * float(logits.abs().max())


def test_what_it_sees_with_is_not_loaded_nor_asked_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_seeing(tmp_path)
    text = sum(each.numel() for each in model.model.language_model.parameters())
    assert load(tmp_path, "float32", device="cpu").parameters == text
    monkeypatch.setattr(loading, "physical_memory", lambda: 8 * text)  # four twice for a moment
    check_before_weights(tmp_path, 0, {"F32": 2 * text}, device="cpu")


def test_it_is_proven_apart_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lexshard.actors.remembered.home_folder", lambda: tmp_path / "home")
    save_seeing(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"].pop("hidden_activation")  # as Google's files do
    file.write_text(json.dumps(config))
    assert is_to_prove(tmp_path, "auto", "auto")
    load(tmp_path, device="cpu")
    assert not is_to_prove(tmp_path, "auto", "auto")
