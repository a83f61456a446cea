"""The sampling state of sequences: histories, keys and controls, and what they ask of the head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from actors.messages import Adjustment, Need, NeedKind, Request, SamplingParameters
from actors.states.deltas import Deltas
from actors.states.penalty_tables import PenaltyTables


class SequenceState:
    """The sampling state of one sequence: its history, key and controls.

    ``vocabulary_size`` is the tokenizer's, ``eos_ids`` the model's end-of-sequence ids. Resumed
    ids count as output. ``tables`` hold what penalised sequences have seen, from the first
    `adjustment` on; without them a sequence has its own. Raises `ValueError` for a temperature
    whose inverse fp32 cannot hold.
    """

    def __init__(
        self,
        request: Request,
        vocabulary_size: int,
        eos_ids: Sequence[int],
        tables: PenaltyTables | None = None,
    ) -> None:
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
        self._tables = tables
        self._table = -1
        self._vocabulary_size = vocabulary_size
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
        self._last: Adjustment | None = None
        for token_id in request.resumed_ids:
            self.append(token_id)

    @property
    def position(self) -> int:
        """The index, in prompt + output, of the token to be drawn next."""
        return len(self.history)

    @property
    def output_length(self) -> int:
        return len(self.history) - self.prompt_length

    @property
    def steady(self) -> bool:
        """Whether `adjustment` means the same from now on, counts aside: no ban comes or goes."""
        return not self._bad_phrases and self.output_length >= self.parameters.min_tokens

    def append(self, token_id: int) -> None:
        """Records an output token. The last `Need` given must no longer be in use."""
        self.history.append(token_id)
        if self._tables is not None and self._table >= 0:
            self._tables.append(self._table, token_id)

    def close(self) -> None:
        """Gives back what the sequence holds of the tables."""
        if self._tables is not None and self._table >= 0:
            self._tables.close(self._table, self.history)
            self._table = -1

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
            adjustment=self.adjustment(),
        )

    def adjustment(self) -> Adjustment | None:
        """The processors of the next token; None where there are none."""
        banned = self._banned()
        if not (self._penalised or len(banned) or len(self._bias_ids) or self._allowed is not None):
            return None
        tables = self._own_table()
        last = self._last
        if last is not None and last.banned is banned and last.tables is tables:
            return last
        parameters = self.parameters
        self._last = Adjustment(
            repetition=parameters.repetition_penalty,
            frequency=parameters.frequency_penalty,
            presence=parameters.presence_penalty,
            tables=tables,
            table=self._table,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            banned=banned,
            allowed=self._allowed,
        )
        return self._last

    def _own_table(self) -> npt.NDArray[np.int32] | None:
        """The array in which row ``self._table`` counts what has been seen."""
        if not self._penalised:
            return None
        if self._tables is None:
            self._tables = PenaltyTables(self._vocabulary_size, 1)
        if self._table < 0:
            length = self.prompt_length
            self._table = self._tables.open(self.history[:length], self.history[length:])
        return self._tables.tables

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


class SequenceStates:
    """The states of many sequences by name, kept up to date by deltas or one call at a time."""

    def __init__(self, vocabulary_size: int, eos_ids: Sequence[int], capacity: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._eos_ids = tuple(eos_ids)
        self._tables = PenaltyTables(vocabulary_size, capacity)
        self._states: dict[int, SequenceState] = {}

    def __getitem__(self, sequence: int) -> SequenceState:
        return self._states[sequence]

    def __len__(self) -> int:
        return len(self._states)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """What `Adjustment.tables` of a penalised sequence is at present."""
        return self._tables.tables

    def open(self, sequence: int, request: Request) -> SequenceState:
        """A new sequence. Raises what `SequenceState` raises."""
        state = SequenceState(request, self.vocabulary_size, self._eos_ids, self._tables)
        self._states[sequence] = state
        return state

    def close(self, sequence: int) -> None:
        self._states.pop(sequence).close()

    def apply(self, deltas: Deltas) -> None:
        """What happened elsewhere happens here."""
        for sequence in deltas.closed:
            self.close(sequence)
        for opened in deltas.opened:
            state = self.open(opened.sequence, opened.request)
            for token_id in opened.output_ids[len(opened.request.resumed_ids) :]:
                state.append(token_id)
        for sequence, token_id in deltas.appended:
            self._states[sequence].append(token_id)


def _inverse_temperature(temperature: float) -> float:
    """``fp32(1 / temperature)``, 0 for greedy."""
    if temperature == 0:
        return 0.0
    with np.errstate(over="ignore"):
        inverse = float(np.float32(1.0 / temperature))
    if not 0 < inverse < math.inf:
        raise ValueError(f"temperature {temperature} is out of range: use 0 for greedy")
    return inverse


def _sorted_ids(ids: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.array(sorted(set(ids)), np.int32)
