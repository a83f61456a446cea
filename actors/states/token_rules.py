"""What a request says of single tokens, ready for every row that draws for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import SamplingParameters
from lexshard.actors.states.mask import Mask

Ids = npt.NDArray[np.int32]


class TokenRules:
    """Biases, allowed and banned tokens of ``parameters``, as sorted and distinct ids, and a mask.

    ``eos_ids`` are the model's end-of-sequence ids: they and the request's stop tokens are banned
    ``early``, which is before `SamplingParameters.min_tokens`. Sorting many ids takes longer than
    all else at the start of a sequence, so sequences of the same rules share them. Raises
    `ValueError` for a bias that fp32 cannot hold.
    """

    def __init__(
        self, parameters: SamplingParameters, vocabulary_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._made_from = _lists(parameters)
        biases = dict(parameters.logit_bias)
        self.bias_ids = _sorted_ids(biases)
        with np.errstate(over="ignore"):
            self.bias_values = np.array([biases[i] for i in self.bias_ids.tolist()], np.float32)
        if not np.isfinite(self.bias_values).all():
            raise ValueError("logit_bias holds a value that is not finite")
        allowed = parameters.allowed_ids
        self.mask = None if allowed is None else Mask.of_ids(allowed, vocabulary_size)
        words = parameters.bad_words
        self.phrases = PhraseEnds(word for word in words if len(word) > 1)
        self._banned = _sorted_ids(word[0] for word in words if len(word) == 1)
        self._banned_early = _sorted_ids(
            chain(self._banned.tolist(), eos_ids, parameters.stop_token_ids)
        )

    def are_those_of(self, parameters: SamplingParameters) -> bool:
        """Whether these rules are what ``parameters`` say."""
        return all(
            own is other or own == other
            for own, other in zip(self._made_from, _lists(parameters), strict=True)
        )

    def banned(self, history: Sequence[int], drafted: tuple[int, ...], *, early: bool) -> Ids:
        """What must not follow ``history`` and ``drafted``."""
        banned = self._banned_early if early else self._banned
        ends = self.phrases.after(history, drafted)
        return np.unique(np.concatenate([banned, *ends])) if ends else banned


class PhraseEnds:
    """Which tokens would complete one of ``phrases`` of two tokens or more.

    A tree of the phrases without their last tokens, read backwards: what a row costs is the length
    of the phrase that its text is in the midst of, however many there are.
    """

    def __init__(self, phrases: Iterable[tuple[int, ...]]) -> None:
        self._root = _Node()
        last_tokens: dict[_Node, list[int]] = {}
        for *beginning, last in phrases:
            node = self._root
            for token in reversed(beginning):
                node = node.before.setdefault(token, _Node())
            last_tokens.setdefault(node, []).append(last)
        for node, ids in last_tokens.items():
            node.ends = _sorted_ids(ids)

    def __bool__(self) -> bool:
        return bool(self._root.before)

    def after(self, history: Sequence[int], drafted: tuple[int, ...]) -> list[Ids]:
        """The tokens that complete a phrase after ``history`` and ``drafted``."""
        found: list[Ids] = []
        node: _Node | None = self._root
        for token in chain(reversed(drafted), reversed(history)):
            node = node.before.get(token) if node is not None else None
            if node is None:
                break
            if node.ends is not None:
                found.append(node.ends)
        return found


class _Node:
    """The phrases that go on, read backwards, with the tokens on the way to here. ``ends`` are the
    last tokens of those that begin here."""

    __slots__ = ("before", "ends")

    def __init__(self) -> None:
        self.before: dict[int, _Node] = {}
        self.ends: Ids | None = None


def _lists(parameters: SamplingParameters) -> tuple[object, ...]:
    return (
        parameters.logit_bias,
        parameters.allowed_ids,
        parameters.bad_words,
        parameters.stop_token_ids,
    )


def _sorted_ids(ids: Iterable[int]) -> Ids:
    return np.unique(np.fromiter(ids, np.int32))
