"""Calibration: hidden states that the model really computes, before its output head."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Body, whole_text
from lexshard.kernels.attention import BLOCK_SIZE

PROMPTS = 16
PROMPT_TOKENS = 64
POSITIONS = 16  # per prompt
FIRST_POSITION = 4  # the very first tokens have no context worth the name

BUNDLED_TEXT = "the bundled passages"
RANDOM_TOKENS = "random token ids (the model has no tokenizer)"


class Prompts(NamedTuple):
    source: str
    token_ids: list[list[int]]


def calibration_prompts(
    tokenizer: Any | None, vocabulary_size: int, max_positions: int, seed: int
) -> Prompts:
    """Sixteen prompts of at most 64 tokens: real text, or random ids without a tokenizer."""
    length = min(PROMPT_TOKENS, max_positions)
    if tokenizer is None:
        generator = np.random.Generator(np.random.Philox(key=seed))
        ids = generator.integers(0, vocabulary_size, (PROMPTS, length))
        return Prompts(RANDOM_TOKENS, ids.tolist())
    text = resources.files("lexshard.actors.index").joinpath("calibration", "passages.txt")
    passages = text.read_text(encoding="utf-8").split("\n===\n")
    return Prompts(BUNDLED_TEXT, [list(tokenizer(p.strip()).input_ids)[:length] for p in passages])


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a model folder, None where there is none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    from transformers import AutoTokenizer  # takes seconds

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def fine_grained_ids(tokenizer: Any | None, vocabulary_size: int) -> list[int]:
    """Special tokens and tokens that are numbers: what structured output is made of."""
    if tokenizer is None:
        return []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids)
    # Byte-level and SentencePiece tokenizers write a leading space as one of these.
    tokens = tokenizer.get_vocab().items()
    numeric = {i for token, i in tokens if token.strip("\u0120\u2581 ").isdecimal()}
    return sorted(i for i in special | numeric if i < vocabulary_size)


def hidden_states(body: Body, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Hidden states [M, d] after the final norm, at most 16 positions of every prompt in order.

    Takes the body's cache for itself: allocate it anew afterwards.
    """
    longest = max(len(prompt) for prompt in prompts)
    body.allocate_cache(-(-longest // BLOCK_SIZE))
    with torch.inference_mode():
        states = [
            body.forward(whole_text(prompt, spread_positions(prompt))).float().cpu().numpy()
            for prompt in prompts
        ]
    return np.concatenate(states)


def spread_positions(prompt: Sequence[int], count: int = POSITIONS) -> npt.NDArray[np.int32]:
    """At most ``count`` positions of a prompt whose hidden states are wanted, spread evenly."""
    last = len(prompt) - 1
    spread = np.linspace(min(FIRST_POSITION, last), last, count).round()
    return np.unique(spread).astype(np.int32)
