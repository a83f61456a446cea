"""The sampling state of sequences: histories, keys and controls, and what they ask of the head.

A row draws a token for a sequence, perhaps on the assumption that some guessed tokens follow its
own. Position, bans and penalties of a row are those of the sequence with these guesses appended;
the sequence itself does not change before tokens are its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import NeedKind, Request, SamplingParameters
from lexshard.actors.states.deltas import Deltas
from lexshard.actors.states.mask import Mask
from lexshard.actors.states.need import Adjustment
from lexshard.actors.states.noise_key import noise_key
from lexshard.actors.states.penalty_tables import PenaltyTables, TableAhead
from lexshard.actors.states.row_table import (
    RowNames,
    RowTable,
    flatten_adjustments,
    search_kind,
)
from lexshard.actors.states.token_rules import TokenRules
from lexshard.kernels.decision import pack
from lexshard.kernels.draw import Controls

KNOWN_TABLES = 32  # sets of sequences whose table is remembered
# Guesses whose rows of counts, as long as the vocabulary, a sequence keeps from step to step: as
# many as a device sends at once.
MOST_AHEAD = 16


class SequenceState:
    """The sampling state of one sequence: its history, key and controls.

    ``vocabulary_size`` is the tokenizer's, ``eos_ids`` the model's end-of-sequence ids. Resumed
    ids count as output. ``tables`` hold what penalised sequences have seen, from the first
    `adjustment` on; without them a sequence has its own. ``rules`` are those of the request's
    parameters, where another sequence has them. Raises `ValueError` for a temperature whose
    inverse, or a penalty or bias that fp32 cannot hold.
    """

    def __init__(
        self,
        request: Request,
        vocabulary_size: int,
        eos_ids: Sequence[int],
        tables: PenaltyTables | None = None,
        rules: TokenRules | None = None,
    ) -> None:
        parameters = request.parameters
        self.parameters: SamplingParameters = parameters
        self.key = noise_key(parameters.seed, request.choice)
        self.history: list[int] = list(request.prompt_ids)
        self.prompt_length = len(self.history)
        self.inverse_temperature = _inverse_temperature(parameters.temperature)
        self.top_k = parameters.top_k if 0 < parameters.top_k < vocabulary_size else 0
        self.log_min_p = math.log(parameters.min_p) if parameters.min_p > 0 else -math.inf
        self.kind = self._need_kind()
        self.penalised = (
            parameters.repetition_penalty != 1.0
            or parameters.frequency_penalty != 0.0
            or parameters.presence_penalty != 0.0
        )
        if self.penalised:
            _check_penalties(parameters)
        self._tables = tables
        self._table = -1
        self._vocabulary_size = vocabulary_size
        self._rules = rules or TokenRules(parameters, vocabulary_size, eos_ids)
        self._last: Adjustment | None = None
        self._ahead: list[TableAhead] = []
        self.append(*request.resumed_ids)

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
        return not self._rules.phrases and self.output_length >= self.parameters.min_tokens

    def may_follow(self, token_id: int) -> bool:
        """Whether a token that its mask holds is not banned at the next place."""
        return token_id not in self._banned(())

    def append(self, *token_ids: int) -> None:
        """Records output tokens. No table of an earlier step may be in use."""
        self.history.extend(token_ids)
        if self._tables is not None and self._table >= 0:
            for token_id in token_ids:
                self._tables.append(self._table, token_id)
            self._close_ahead(MOST_AHEAD)

    def close(self) -> None:
        """Gives back what the sequence holds of the tables."""
        if self._tables is not None and self._table >= 0:
            self._close_ahead(0)
            self._tables.close(self._table, self.history)
            self._table = -1

    def adjustment(
        self, drafted: tuple[int, ...] = (), mask: Mask | None = None
    ) -> Adjustment | None:
        """The processors of the token after the sequence's own and ``drafted``; None where there
        are none. ``mask`` is a grammar's."""
        banned = self._banned(drafted)
        rules = self._rules
        mask = mask or rules.mask
        if not (self.penalised or len(banned) or len(rules.bias_ids) or mask is not None):
            return None
        tables = self._own_table()
        if drafted:
            if tables is None:
                return self._adjustment(None, -1, banned, mask)
            table = self._table_ahead(drafted)  # may make the tables grow
            return self._adjustment(self._own_table(), table, banned, mask)
        last = self._last
        if (
            last is not None
            and last.banned is banned
            and last.tables is tables
            and last.mask is mask
        ):
            return last
        self._last = self._adjustment(tables, self._table, banned, mask)
        return self._last

    def _adjustment(
        self,
        tables: npt.NDArray[np.int32] | None,
        table: int,
        banned: npt.NDArray[np.int32],
        mask: Mask | None,
    ) -> Adjustment:
        parameters = self.parameters
        return Adjustment(
            repetition=parameters.repetition_penalty,
            frequency=parameters.frequency_penalty,
            presence=parameters.presence_penalty,
            tables=tables,
            table=table,
            bias_ids=self._rules.bias_ids,
            bias_values=self._rules.bias_values,
            banned=banned,
            mask=mask,
            seen=None if self._tables is None or table < 0 else partial(self._tables.seen, table),
        )

    def _table_ahead(self, drafted: tuple[int, ...]) -> int:
        """The row that counts what will have been seen after ``drafted``: one for every number of
        guesses, so that the rows of a step do not disturb each other."""
        assert self._tables is not None
        while len(self._ahead) < len(drafted):
            self._ahead.append(TableAhead(self._tables, self._table, len(self.history)))
        return self._ahead[len(drafted) - 1].show(self.history, drafted)

    def _close_ahead(self, kept: int) -> None:
        """Gives back the rows of all but the first ``kept`` guesses."""
        for ahead in self._ahead[kept:]:
            ahead.close(self.history)
        del self._ahead[kept:]

    def _own_table(self) -> npt.NDArray[np.int32] | None:
        """The array in which row ``self._table`` counts what has been seen."""
        if not self.penalised:
            return None
        if self._tables is None:
            self._tables = PenaltyTables(self._vocabulary_size, 1)
        if self._table < 0:
            length = self.prompt_length
            self._table = self._tables.open(self.history[:length], self.history[length:])
        return self._tables.tables

    def _need_kind(self) -> NeedKind:
        if self.parameters.logprobs is not None:
            return "labels" if self.parameters.labels else "dense"
        if self.inverse_temperature == 0:
            return "top1"
        if self.top_k:
            return "topk"
        if self.parameters.min_p > 0:
            return "minp"
        return "nucleus-draw" if self.parameters.top_p < 1 else "top1"

    def _banned(self, drafted: tuple[int, ...]) -> npt.NDArray[np.int32]:
        early = self.output_length + len(drafted) < self.parameters.min_tokens
        return self._rules.banned(self.history, drafted, early=early)


@dataclass(slots=True, eq=False)
class _KnownTable:
    """The table of sequences that often have rows together, but for the positions of these."""

    states: tuple[SequenceState, ...]
    table: RowTable
    tables: npt.NDArray[np.int32]
    penalised: bool
    masks: tuple[Mask | None, ...]

    def holds(self, tables: npt.NDArray[np.int32], *, drafted: bool) -> bool:
        """Whether it still does; penalties count drafted tokens in rows of their own."""
        return self.tables is tables and not (drafted and self.penalised)

    def take(self, masks: tuple[Mask | None, ...]) -> None:
        """The rows have these ``masks`` now: inside a string, say, those of before."""
        if not all(map(operator.is_, masks, self.masks)):
            self.table, self.masks = self.table.masked(masks), masks


class SequenceStates:
    """The states of many sequences by name, kept up to date by deltas or one call at a time."""

    def __init__(self, vocabulary_size: int, eos_ids: Sequence[int], capacity: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._eos_ids = tuple(eos_ids)
        self._tables = PenaltyTables(vocabulary_size, capacity)
        self._states: dict[int, SequenceState] = {}
        self._rules: TokenRules | None = None  # of the last sequence: choices come side by side
        # By sequences, and whether grammars have masks for them.
        self._known: dict[tuple[tuple[int, ...], bool], _KnownTable] = {}
        self._last: tuple[RowNames, RowTable] | None = None

    def __getitem__(self, sequence: int) -> SequenceState:
        return self._states[sequence]

    def __len__(self) -> int:
        return len(self._states)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """What `Adjustment.tables` of a penalised sequence is at present."""
        return self._tables.tables

    def open(
        self, sequence: int, request: Request, rules: TokenRules | None = None
    ) -> SequenceState:
        """A new sequence, of ``rules`` that are its own or of those that its parameters say. Raises
        what `SequenceState` raises."""
        if rules is None:
            rules = self._rules
            if rules is None or not rules.are_those_of(request.parameters):
                rules = self._rules = TokenRules(
                    request.parameters, self.vocabulary_size, self._eos_ids
                )
        state = SequenceState(request, self.vocabulary_size, self._eos_ids, self._tables, rules)
        self._states[sequence] = state
        return state

    def close(self, sequence: int) -> None:
        self._states.pop(sequence).close()
        self._known.clear()

    def table(self, rows: RowNames) -> RowTable:
        """What ``rows`` ask. Its arrays hold until the next step's table is asked for."""
        last = self._last
        if last is not None and last[0] is rows:
            return last[1]
        known = None if rows.tests else self._known.get((rows.sequences, bool(rows.masks)))
        if known is not None and known.holds(self.tables, drafted=bool(rows.drafted)):
            known.take(rows.masks)
            table = known.table
            table.controls.position[:] = positions = _positions(known.states, rows)
            if table.packed is not None:
                table.packed.position[:] = positions
        else:
            table = self._make_table(rows)
        self._last = rows, table
        return table

    def steady_table(self, rows: RowNames) -> RowTable | None:
        """What ``rows`` ask where their sequences ask the same after each more token, but for
        positions; else None."""
        table = self.table(rows)
        known = self._known.get((rows.sequences, bool(rows.masks)))
        return table if known is not None and known.table is table else None

    def _make_table(self, rows: RowNames) -> RowTable:
        states = tuple(self._states[sequence] for sequence in rows.sequences)
        adjustments = tuple(self.adjustments(rows))
        kinds, guesses = [state.kind for state in states], {}
        for row, test in rows.tests.items():
            # Bounds tell of a guess where nothing is truncated; else its candidates do.
            by_bounds = test.exactly and kinds[row] == "top1"
            if by_bounds or not test.exactly:
                kinds[row] = "dense"
            elif kinds[row] == "nucleus-draw":
                kinds[row] = "nucleus"
            if by_bounds:
                guesses[row] = test
        controls = Controls(
            inverse_temperature=np.array([s.inverse_temperature for s in states], np.float64),
            top_k=np.array([state.top_k for state in states], np.int64),
            top_p=np.array([state.parameters.top_p for state in states], np.float64),
            log_min_p=np.array([state.log_min_p for state in states], np.float64),
            key=np.array([state.key for state in states], np.uint64),
            position=np.array(_positions(states, rows), np.uint64),
        )
        flat = flatten_adjustments(adjustments)
        table = RowTable(
            kinds=tuple(kinds),
            searched=np.array(
                [search_kind(k, s.inverse_temperature) for k, s in zip(kinds, states, strict=True)],
                np.int64,
            ),
            controls=controls,
            min_p=np.array([state.parameters.min_p for state in states], np.float64),
            epsilon=np.zeros(len(states)),
            adjustments=adjustments,
            flat=flat,
            guesses=guesses,
            logprobs=tuple(state.parameters.logprobs for state in states),
            packed=pack(controls, flat),
        )
        penalised = any(state.penalised for state in states)
        steady = all(state.steady for state in states)
        if steady and not rows.tests and not (rows.drafted and penalised):
            if len(self._known) >= KNOWN_TABLES:
                self._known.clear()
            known = _KnownTable(states, table, self.tables, penalised, rows.masks)
            self._known[rows.sequences, bool(rows.masks)] = known
        return table

    def adjustments(self, rows: RowNames) -> list[Adjustment | None]:
        """The processors of the rows, all in one array of tables."""
        count = len(rows.sequences)
        drafted = rows.drafted or ((),) * count
        masks = rows.masks or (None,) * count

        def every() -> list[Adjustment | None]:
            return [
                self._states[sequence].adjustment(guesses, mask)
                for sequence, guesses, mask in zip(rows.sequences, drafted, masks, strict=True)
            ]

        tables = self.tables
        found = every()
        # Where the tables had to grow, the first rows still have the array of before.
        return found if self.tables is tables else every()

    def apply(self, deltas: Deltas) -> None:
        """What happened elsewhere happens here."""
        for sequence in deltas.closed:
            self.close(sequence)
        for opened in deltas.opened:
            state = self.open(opened.sequence, opened.request)
            state.append(*opened.output_ids[len(opened.request.resumed_ids) :])
        for sequence, token_ids in deltas.appended:
            self._states[sequence].append(*token_ids)


def _positions(states: Sequence[SequenceState], rows: RowNames) -> list[int]:
    """Of the tokens to be drawn, each after its sequence's own, those drafted and unknown ones."""
    if not rows.drafted:
        return [len(state.history) + rows.unknown for state in states]
    return [
        len(state.history) + len(guesses) + rows.unknown
        for state, guesses in zip(states, rows.drafted, strict=True)
    ]


def _check_penalties(parameters: SamplingParameters) -> None:
    factor = parameters.repetition_penalty
    with np.errstate(over="ignore"):
        others = np.array([parameters.frequency_penalty, parameters.presence_penalty], np.float32)
        if not 0 < float(np.float32(factor)) < math.inf:
            raise ValueError(f"repetition_penalty {factor} is out of range: 1 is none")
    if not np.isfinite(others).all():
        raise ValueError("frequency_penalty or presence_penalty is not finite")


def _inverse_temperature(temperature: float) -> float:
    """``fp32(1 / temperature)``, 0 for greedy."""
    if temperature == 0:
        return 0.0
    with np.errstate(over="ignore"):
        inverse = float(np.float32(1.0 / temperature))
    if not 0 < inverse < math.inf:
        raise ValueError(f"temperature {temperature} is out of range: use 0 for greedy")
    return inverse
