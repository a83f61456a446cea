"""The decision plane: what each sequence asks of the head, and the token it gets.

The order of one decision: allowed ids, bad words and minimum length, logit bias; repetition,
frequency and presence penalties; temperature; min-p; top-k; top-p; draw. Log-probabilities are
those of the raw logits, before all of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from actors.messages import (
    Adjustment,
    Candidates,
    Need,
    NeedKind,
    Request,
    RowDecision,
    SamplingParameters,
    TokenLogprobs,
)
from kernels.draw import Controls, draw
from kernels.truncate import best_ids

NO_IDS = np.empty(0, np.int32)
NO_VALUES = np.empty(0, np.float32)


class AllTokensExcludedError(ValueError):
    """Some rows have no token left to draw. ``decisions`` holds the others' (None for ``rows``)."""

    def __init__(self, rows: Sequence[int], decisions: Sequence[RowDecision | None]) -> None:
        self.rows = tuple(rows)
        self.decisions = tuple(decisions)
        super().__init__(
            "every token is excluded by allowed token ids, bad words, logit bias or min_tokens: "
            "relax one of them"
        )


class SequenceState:
    """The sampling state of one sequence: its history, key and controls.

    ``vocabulary_size`` is the tokenizer's, ``eos_ids`` the model's end-of-sequence ids. Resumed
    ids count as output. Raises `ValueError` for a temperature whose inverse fp32 cannot hold.
    """

    def __init__(self, request: Request, vocabulary_size: int, eos_ids: Sequence[int]) -> None:
        parameters = request.parameters
        self.parameters: SamplingParameters = parameters
        self.key = (parameters.seed + request.choice) % 2**64
        self.history: list[int] = list(request.prompt_ids)
        self.prompt_length = len(self.history)
        self.inverse_temperature = _inverse_temperature(parameters.temperature)
        self.top_k = parameters.top_k if 0 < parameters.top_k < vocabulary_size else 0
        self.log_min_p = math.log(parameters.min_p) if parameters.min_p > 0 else -math.inf
        self._kind = self._need_kind()
        self._penalised = (
            parameters.repetition_penalty != 1.0
            or parameters.frequency_penalty != 0.0
            or parameters.presence_penalty != 0.0
        )
        self._seen_ids = NO_IDS
        self._output_counts = NO_IDS
        if self._penalised:
            self._seen_ids = np.unique(np.array(self.history, np.int32))
            self._output_counts = np.zeros(len(self._seen_ids), np.int32)
        biases = dict(parameters.logit_bias)
        self._bias_ids = _sorted_ids(biases)
        self._bias_values = np.array([biases[i] for i in self._bias_ids.tolist()], np.float32)
        self._allowed = None
        if parameters.allowed_ids is not None:
            self._allowed = _sorted_ids(parameters.allowed_ids)
        words = parameters.bad_words
        self._bad_phrases = tuple(word for word in words if len(word) > 1)
        self._always_banned = _sorted_ids(word[0] for word in words if len(word) == 1)
        self._early_banned = np.union1d(
            self._always_banned, _sorted_ids((*eos_ids, *parameters.stop_token_ids))
        ).astype(np.int32)
        for token_id in request.resumed_ids:
            self.append(token_id)

    @property
    def position(self) -> int:
        """The index, in prompt + output, of the token to be drawn next."""
        return len(self.history)

    @property
    def output_length(self) -> int:
        return len(self.history) - self.prompt_length

    def append(self, token_id: int) -> None:
        """Records an output token. The last `Need` given must no longer be in use."""
        self.history.append(token_id)
        if not self._penalised:
            return
        place = int(np.searchsorted(self._seen_ids, token_id))
        if place == len(self._seen_ids) or self._seen_ids[place] != token_id:
            self._seen_ids = _inserted(self._seen_ids, place, token_id)
            self._output_counts = _inserted(self._output_counts, place, 0)
        self._output_counts[place] += 1

    def need(self) -> Need:
        """What the head must know to give this sequence its next token.

        Its arrays are this object's own: they hold until the next `append`.
        """
        return Need(
            kind=self._kind,
            k=self.top_k,
            min_p=self.parameters.min_p,
            top_p=self.parameters.top_p,
            key=self.key,
            position=len(self.history),
            inverse_temperature=self.inverse_temperature,
            adjustment=self._adjustment(),
        )

    def _need_kind(self) -> NeedKind:
        if self.parameters.logprobs is not None:
            return "dense"
        if self.inverse_temperature == 0:
            return "top1"
        if self.top_k:
            return "topk"
        if self.parameters.min_p > 0:
            return "minp"
        return "nucleus" if self.parameters.top_p < 1 else "top1"

    def _banned(self) -> npt.NDArray[np.int32]:
        early = self.output_length < self.parameters.min_tokens
        banned = self._early_banned if early else self._always_banned
        if not self._bad_phrases:
            return banned
        history = self.history
        ends = [
            phrase[-1]
            for phrase in self._bad_phrases
            if tuple(history[1 - len(phrase) :]) == phrase[:-1]
        ]
        return np.union1d(banned, _sorted_ids(ends)).astype(np.int32) if ends else banned

    def _adjustment(self) -> Adjustment | None:
        banned = self._banned()
        if not (self._penalised or len(banned) or len(self._bias_ids) or self._allowed is not None):
            return None
        parameters = self.parameters
        return Adjustment(
            repetition=parameters.repetition_penalty,
            frequency=parameters.frequency_penalty,
            presence=parameters.presence_penalty,
            seen_ids=self._seen_ids,
            output_counts=self._output_counts,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            banned=banned,
            allowed=self._allowed,
        )


class Sampler:
    """Draws tokens from candidates. It keeps no state: the sequences do."""

    def decide(
        self,
        candidates: Candidates,
        states: Sequence[SequenceState],
        log_normalizers: npt.NDArray[np.float64] | None = None,
    ) -> list[RowDecision]:
        """One decision per row of ``candidates``, row ``r`` for ``states[r]``.

        ``log_normalizers`` [N] is needed where a request asks for logprobs (see
        `Shard.log_normalizers`). Raises `AllTokensExcludedError`, which carries the decisions of
        all other rows, where a row has no token left.
        """
        controls = Controls(
            inverse_temperature=np.array([s.inverse_temperature for s in states], np.float64),
            top_k=np.array([s.top_k for s in states], np.int64),
            top_p=np.array(
                [
                    1.0 if certificate.truncated else state.parameters.top_p
                    for state, certificate in zip(states, candidates.certificates, strict=True)
                ],
                np.float64,
            ),
            log_min_p=np.array([s.log_min_p for s in states], np.float64),
            key=np.array([s.key for s in states], np.uint64),
            position=np.array([len(s.history) for s in states], np.uint64),
        )
        tokens = draw(candidates.ids, candidates.logits, candidates.offsets, controls).tolist()
        decisions: list[RowDecision | None] = []
        for row, (token_id, state) in enumerate(zip(tokens, states, strict=True)):
            if token_id < 0:
                decisions.append(None)
                continue
            logprobs, count = None, state.parameters.logprobs
            if count is not None:
                if log_normalizers is None:
                    raise ValueError(f"row {row} asks for logprobs: give log_normalizers")
                raw = candidates.raw[candidates.offsets[row] : candidates.offsets[row + 1]]
                logprobs = token_logprobs(raw, float(log_normalizers[row]), token_id, count)
            certificate = candidates.certificates[row] if state.parameters.certificate else None
            decisions.append(RowDecision(token_id, logprobs, certificate))
        complete = [decision for decision in decisions if decision is not None]
        if len(complete) < len(decisions):
            excluded = [row for row, decision in enumerate(decisions) if decision is None]
            raise AllTokensExcludedError(excluded, decisions)
        return complete


def token_logprobs(
    raw: npt.NDArray[np.float32], log_normalizer: float, token_id: int, count: int
) -> TokenLogprobs:
    """Log-probabilities of one position from all its raw logits [V]: the token's, and the
    ``count`` most likely ones by (logit descending, id ascending)."""
    logit = raw[token_id]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logit) - log_normalizer,
        rank=1 + int(np.count_nonzero(raw > logit)),
        top=tuple(
            (place, float(raw[place]) - log_normalizer) for place in best_ids(raw, count).tolist()
        ),
    )


def _inverse_temperature(temperature: float) -> float:
    """``fp32(1 / temperature)``, 0 for greedy."""
    if temperature == 0:
        return 0.0
    with np.errstate(over="ignore"):
        inverse = float(np.float32(1.0 / temperature))
    if not 0 < inverse < math.inf:
        raise ValueError(f"temperature {temperature} is out of range: use 0 for greedy")
    return inverse


def _inserted(values: npt.NDArray[np.int32], place: int, value: int) -> npt.NDArray[np.int32]:
    """`numpy.insert` of one value, ten times faster."""
    result = np.empty(len(values) + 1, np.int32)
    result[:place] = values[:place]
    result[place] = value
    result[place + 1 :] = values[place:]
    return result


def _sorted_ids(ids: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.array(sorted(set(ids)), np.int32)
