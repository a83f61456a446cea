"""A draft model whose tokens are not the target's is refused, and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lexshard.actors.body.errors import ModelPathError
from lexshard.actors.drafter.loading import TokenizerMismatchError, check_same_tokens
from tests.support.paths import DEMO, DEMO_DRAFT


def test_the_demo_pair_has_one_tokenizer() -> None:
    check_same_tokens(DEMO_DRAFT, DEMO)


def changed(folder: Path, change: Callable[[dict], object]) -> Path:
    description = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    change(description)
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


def test_another_way_to_write_the_same_tokens_is_fine(tmp_path: Path) -> None:
    check_same_tokens(changed(tmp_path, lambda description: None), DEMO)


def test_one_token_that_differs_is_too_many(tmp_path: Path) -> None:
    def rename(description: dict) -> None:
        added = description["added_tokens"][-1]
        vocabulary = description["model"]["vocab"]
        vocabulary.pop(added["content"], None)
        added["content"] = "<|another|>"

    folder = changed(tmp_path, rename)
    with pytest.raises(TokenizerMismatchError, match="2 tokens of their tokenizers differ"):
        check_same_tokens(folder, DEMO)
    with pytest.raises(TokenizerMismatchError, match="target's tokenizer"):
        check_same_tokens(DEMO_DRAFT, folder)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match="not a folder"):
        check_same_tokens(tmp_path / "nothing", DEMO)
    with pytest.raises(TokenizerMismatchError, match="save_pretrained"):
        check_same_tokens(tmp_path, DEMO)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerMismatchError, match="download the model again"):
        check_same_tokens(tmp_path, DEMO)
