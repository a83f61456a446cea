"""Prompts of given lengths from a story, so that they are real text for any tokenizer."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path

STORY = Path(__file__).parent / "data" / "a_kidnapped_santa_claus.txt"
_OPENING_WORDS = 4  # drawn one by one: no two texts share a beginning by accident
_EXCERPT_WORDS = 12


class PromptWriter:
    """Writes prompts of about so many tokens. The same ``seed`` writes the same.

    Lengths are counted in words, ``tokens_per_word`` of them each: what a server's tokenizer makes
    of them is in its answers. A block of a trace (``block_tokens``, `traces.BLOCK_TOKENS` times the
    scale of the lengths) is the same text wherever its id appears.
    """

    def __init__(self, seed: int, tokens_per_word: float, block_tokens: float) -> None:
        self._seed = seed
        self._tokens_per_word = tokens_per_word
        self._block_words = self._words_for(block_tokens)

    def write(self, index: int, tokens: float, blocks: tuple[int, ...] = ()) -> str:
        """The prompt of request ``index``: like that of no other, but for the ``blocks`` they
        share."""
        count = self._words_for(tokens)
        if not blocks:
            return " ".join(self._text(f"request {index}", count))
        words = [
            word for block in blocks for word in self._text(f"block {block}", self._block_words)
        ]
        missing = count - len(words)  # by rounding, where a block is short
        return " ".join(words[:count] + self._text(f"request {index}", max(0, missing)))

    def _words_for(self, tokens: float) -> int:
        return max(1, round(tokens / self._tokens_per_word))

    @cached_property
    def _story(self) -> list[str]:
        return STORY.read_text(encoding="utf-8").split()

    def _text(self, key: str, count: int) -> list[str]:
        chance = random.Random(f"{self._seed} {key}")
        words = [chance.choice(self._story) for _ in range(min(count, _OPENING_WORDS))]
        while len(words) < count:
            start = chance.randrange(len(self._story) - _EXCERPT_WORDS)
            words += self._story[start : start + _EXCERPT_WORDS]
        return words[:count]
