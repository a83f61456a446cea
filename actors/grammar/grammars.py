"""The grammars of an engine: compiled beside its steps, remembered, copied for every sequence."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lexshard.actors.grammar.limits import parser_limits
from lexshard.actors.grammar.matcher import GrammarError, Matcher

if TYPE_CHECKING:
    from llguidance import LLTokenizer

REMEMBERED = 128  # compiled grammars
# From here on the tokenizer is made at the start: for fewer tokens all wait a twentieth of a second
# once, and an engine that never sees a grammar keeps 30 MB.
LARGE_VOCABULARY = 32_768


def grammar_tokenizer(
    folder: str | Path, vocabulary_size: int, eos_ids: Sequence[int]
) -> LLTokenizer:
    """What llguidance must know of the tokens of a model in ``folder``. Takes a tenth of a second
    at 16,384 tokens, for which it holds the interpreter lock. Raises ValueError where there is no
    tokenizer, or one of another kind than llguidance reads."""
    from llguidance import LLTokenizer

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json: grammars say which text may follow")
    return LLTokenizer(str(path), n_vocab=vocabulary_size, eos_token=list(eos_ids))


def compiled(
    text: str, tokenizer: LLTokenizer, vocabulary_size: int, eos_ids: Sequence[int]
) -> Matcher:
    """A matcher at the beginning of the grammar ``text``, as llguidance writes it, which has seen
    its first mask: the costliest. Raises `GrammarError` for a grammar that cannot be read, or
    costs too much."""
    from llguidance import LLMatcher

    inner = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    any_follows = any(inner.compute_bitmask())  # without the interpreter lock
    matcher = Matcher(inner, tokenizer, vocabulary_size, eos_ids)
    if not any_follows:
        raise GrammarError("nothing matches the grammar")
    return matcher


class Grammars:
    """Those of a model in ``folder``. The tokenizer is made by `start`, or with the first."""

    def __init__(self, folder: str, vocabulary_size: int, eos_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        self._eos_ids = tuple(eos_ids)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self._making = threading.Lock()
        self._known: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._failed: deque[str] = deque()  # told by the threads that make masks, too

    def start(self) -> list[Future[LLTokenizer]]:
        """Begins to make a large tokenizer, so that it is not made while others are served; fails
        where the model has none for grammars, as every grammar will."""
        if self._vocabulary_size < LARGE_VOCABULARY:
            return []
        return [self._threads.submit(self._made_tokenizer)]

    def ready(self, text: str, wait_seconds: float) -> bool:
        """Whether the grammar is compiled, or has failed to, at the latest in ``wait_seconds``;
        begins with it where it is not."""
        return bool(wait([self._begun(text)], wait_seconds).done)

    def matcher(self, text: str) -> Matcher:
        """A matcher of its own for one sequence; waits where the grammar is not ready. Raises
        `GrammarError`, and ValueError where the model has no tokenizer for grammars.

        Copies share what they have found out, and its limit: where one reaches that, the next one
        is made anew.
        """
        matcher = self._begun(text).result().copy()
        matcher.on_failure = partial(self._failed.append, text)
        return matcher

    def close(self) -> None:
        """Ends the threads that compile."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begun(self, text: str) -> Future[Matcher]:
        while self._failed:
            self._known.pop(self._failed.popleft(), None)
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._threads.submit(self._compile, text)
            # Those on their way are waited for: without them more would begin them again for ever.
            done = [each for each, future in self._known.items() if future.done()]
            for each in done[: max(0, len(self._known) - REMEMBERED)]:
                del self._known[each]
        self._known.move_to_end(text)
        return known

    def _compile(self, text: str) -> Matcher:
        try:
            tokenizer = self._made_tokenizer()
            return compiled(text, tokenizer, self._vocabulary_size, self._eos_ids)
        except ValueError:
            raise
        except BaseException as error:  # a panic is no Exception, and ends its own request alone
            raise GrammarError(f"it cannot be compiled: {error}") from error

    def _made_tokenizer(self) -> LLTokenizer:
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = grammar_tokenizer(
                    self._folder, self._vocabulary_size, self._eos_ids
                )
            return self._tokenizer
