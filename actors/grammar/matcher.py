"""Where one sequence stands in its grammar, and what may come next there.

Everything that is said of a place follows from the tokens before it alone, so that it is the same
for every caller, however often, and whatever was guessed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lexshard.kernels.blocks import blocks_of
from lexshard.kernels.masks import Words, mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Of what must follow so many bytes are read for its first token, where llguidance would read all:
# 10 ms for 64 KB, 60 us for these. Hardly a token is as long, or depends on what is so far behind.
WINDOW = 256


class GrammarError(ValueError):
    """A grammar that cannot be read, costs too much, or lost its way."""


class Matcher:
    """``inner``, of ``tokenizer``, after the tokens that were consumed, of which ``last`` is the
    last, if any. ``eos_ids`` end an output: where nothing else may follow, the first of them must.
    What `forced` told of last was ``long`` if it was a text beyond `WINDOW`. ``on_failure`` is
    called before a `GrammarError`.

    One thread at a time. Methods raise `GrammarError` where the grammar costs more than its limits.
    """

    def __init__(
        self,
        inner: LLMatcher,
        tokenizer: LLTokenizer,
        vocabulary_size: int,
        eos_ids: Sequence[int],
        last: Sequence[int] = (),
    ) -> None:
        self.long = False
        self.on_failure: Callable[[], None] | None = None
        self._inner = inner
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._eos_ids = tuple(eos_ids)
        self._last = list(last)
        self._check()

    def copy(self) -> Matcher:
        """Another one at the same place."""
        inner, size = self._inner.deep_copy(), self._vocabulary_size
        return Matcher(inner, self._tokenizer, size, self._eos_ids, self._last)

    def consume(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these, which it allows."""
        if not self._inner.consume_tokens(list(token_ids)):
            self._check()
        if token_ids:
            self._last = [token_ids[-1]]

    def forced(self) -> int | None:
        """The token that must come next; None where several may, or the grammar does not say
        cheaply that one must."""
        stopped = self._inner.is_stopped()
        found = None if stopped else self._first_forced(self._last)
        self._check()
        return self._eos_ids[0] if stopped else found

    def write_mask(self, words: int) -> None:
        """The mask of what may come next where `forced` says nothing, to the address ``words``, of
        `kernels.masks.Words`. Without the interpreter lock."""
        size = 4 * -(-self._vocabulary_size // 32)
        self._inner.unsafe_compute_mask_ptr(words, size)
        self._check()

    def accepted(self, guesses: Sequence[int]) -> int:
        """How many of ``guesses`` may follow one after the other. None follows an end."""
        for place, token_id in enumerate(guesses):
            if token_id in self._eos_ids:
                guesses = guesses[: place + 1]
                break
        count: int = self._inner.validate_tokens(list(guesses))
        self._check()
        return count

    def masks(self, guesses: Sequence[int]) -> list[Words]:
        """What may come next, and after each more of ``guesses``: their masks, one more than
        guesses. Behind one that is refused, or ends the output, none is drawn from. Nothing may
        follow where the grammar gives up: if it comes to that, it is asked again and says why."""
        found = [self._mask(self._last)]
        rest = self._eos_ids[:1]
        if guesses:
            ahead = self.copy()  # what is guessed must not end what is said
            try:
                for token_id in guesses:
                    if not ahead._goes_on_with(token_id):
                        break
                    found.append(ahead._mask([token_id]))
            except GrammarError:
                rest = ()
        found.extend(
            mask_words(rest, self._vocabulary_size) for _ in range(len(guesses) + 1 - len(found))
        )
        return found

    def _goes_on_with(self, token_id: int) -> bool:
        if self._inner.is_stopped():
            return False
        consumed: int = self._inner.try_consume_tokens([token_id])
        self._check()
        return bool(consumed)

    def _first_forced(self, last: list[int]) -> int | None:
        """The first token of what must follow ``last``, as llguidance reads it; but the spelling of
        a special token, where the grammar wants its characters, is not that token."""
        text = self._inner.compute_ff_bytes()
        self.long = len(text) > WINDOW
        first = self._first_of(text, last) if text else None
        if first is None or not self._tokenizer.is_special_token(first):
            return first
        if self._inner.validate_tokens([first]):
            return first
        spelled = self._tokenizer.greedy_tokenize(text[:WINDOW].decode(errors="ignore"))[:1]
        return spelled[0] if self._inner.validate_tokens(spelled) else None

    def _first_of(self, text: bytes, last: list[int]) -> int | None:
        window = WINDOW
        while window < len(text):
            begun, _ = self._tokenizer.tokenize_partial(text[:window], last)
            if begun:
                return begun[0]
            window *= 4
        found: list[int] = self._inner.compute_ff_tokens()
        return found[0] if found else None

    def _mask(self, last: list[int]) -> Words:
        if self._inner.is_stopped():
            self._check()
            return mask_words(self._eos_ids[:1], self._vocabulary_size)
        forced = self._first_forced(last)
        self._check()
        if forced is not None:
            return mask_words((forced,), self._vocabulary_size)
        words = np.zeros(blocks_of(self._vocabulary_size), np.uint64)
        self.write_mask(words.ctypes.data)
        return words

    def _check(self) -> None:
        if self._inner.is_error():
            if self.on_failure is not None:
                self.on_failure()
            raise GrammarError(self._inner.get_error().strip().splitlines()[0])
