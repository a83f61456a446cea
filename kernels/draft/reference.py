"""Drafting stated plainly: sequence by sequence, guess by guess, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lexshard.kernels.draft.types import Drafted, DraftHead, PendingTokens, Router
from lexshard.kernels.draw.reference import Controls, draw
from lexshard.kernels.linear import PackedWeight, unpack
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.llama.reference import embed, forward
from lexshard.kernels.truncate.reference import truncate

Array = npt.NDArray[Any]


def draft(stack: LlamaStack, head: DraftHead, pending: PendingTokens) -> Drafted:
    """See `kernels.draft.draft`."""
    sequences, longest = len(pending.most), int(pending.most.max(initial=0))
    guesses = np.full((sequences, longest), -1, np.int32)
    states = np.zeros((sequences, max(1, longest), stack.shape.hidden), np.float32)
    rows = np.zeros(sequences, np.int64)
    room = (sequences, longest, len(head.ids)) if pending.record else (0, 0, 0)
    recorded = np.full(room, -np.inf, np.float32)
    for sequence in range(sequences):
        tokens = pending.tokens[pending.offsets[sequence] : pending.offsets[sequence + 1]]
        start, table = int(pending.start[sequence]), pending.block_tables[sequence]
        put_in = forward(stack, tokens.tolist(), start, table)
        before = put_in[-2] if len(put_in) > 1 else pending.state_before[sequence]
        hidden, token, position = put_in[-1], int(tokens[-1]), start + len(tokens)
        states[sequence, 0] = hidden
        for step in range(pending.most[sequence]):
            if step > 0:
                before, hidden = hidden, forward(stack, [token], position - 1, table)[0]
                states[sequence, step] = hidden
            places = _places(head, embed(stack, [token])[0], before, step)
            rows[sequence] += len(places)
            # Summed row by row: equal rows must have equal logits, which a matrix product does not
            # promise.
            logits = (_rows(head.panels)[places] * hidden).sum(axis=1).astype(np.float32)
            own = slice(sequence, sequence + 1)
            controls = Controls(
                pending.inverse_temperature[own],
                pending.top_k[own],
                pending.top_p[own],
                pending.log_min_p[own],
                pending.key[own],
                np.array([position], np.uint64),
            )
            ids, ends = head.ids[places], np.array([0, len(places)])
            token = int(draw(ids, logits, ends, controls)[0])
            if pending.record:
                kept = _kept(logits, controls)
                recorded[sequence, step, places[kept]] = logits[kept]
            if token < 0:
                break
            guesses[sequence, step] = token
            position += 1
    return Drafted(guesses, states, rows, recorded)


def _places(head: DraftHead, embedded: Array, before: Array, step: int) -> Array:
    """The rows of the head that a step looks at and that are tokens, by ascending id."""
    clusters = list(range(len(head.offsets) - 1))
    if head.router is not None:
        others = [cluster for cluster in clusters if cluster not in head.always]
        scores = _scores(head.router, np.concatenate([embedded, before]))
        budget = head.router.budgets[min(step, len(head.router.budgets) - 1)]
        best = sorted(others, key=lambda cluster: (-scores[cluster], cluster))[:budget]
        clusters = [*head.always, *best]
    places = np.array(
        [
            place
            for cluster in clusters
            for place in range(head.offsets[cluster] * PANEL, head.offsets[cluster + 1] * PANEL)
            if head.ids[place] >= 0
        ],
        np.int64,
    )
    return places[np.argsort(head.ids[places])]


def _scores(router: Router, features: Array) -> Array:
    gates = _rows(router.inner) @ features + router.inner_bias
    inner = gates / (1 + np.exp(-gates))
    outer = _rows(router.outer)[: len(router.outer_bias)]
    return np.asarray((outer * inner).sum(axis=1) + router.outer_bias)


def _kept(logits: Array, controls: Controls) -> Array:
    """What a row is drawn from."""
    scale = float(controls.inverse_temperature[0])
    if scale == 0.0:
        return np.ones(len(logits), np.bool_)
    top_k, top_p = int(controls.top_k[0]), float(controls.top_p[0])
    return truncate(logits, scale, top_k, top_p, float(controls.log_min_p[0]))


def _rows(panels: Array) -> Array:
    """The rows ``[16 P, K]`` of packed panels."""
    packed = PackedWeight(panels, len(panels) * PANEL, panels.shape[1])
    return unpack(packed).numpy().astype(np.float64)
