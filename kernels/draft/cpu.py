"""All draft steps of a batch in one native call: body, head, noise, choice, and the next step.

A row's arithmetic is independent of the rows beside it (`kernels.llama`, `kernels.linear`), and
the largest score is the same in any order, so a guess is a function of its own sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from kernels.attention.layout import BLOCK_SIZE
from kernels.blocks import BLOCK
from kernels.draft.checks import FAULTS, pending_fault
from kernels.draft.draw import exclude_fillers, fill_ceilings, offer
from kernels.draft.routing import choose_clusters, score_clusters
from kernels.draft.types import Drafted, DraftHead, PendingTokens, Router
from kernels.linear.cpu import multiply
from kernels.linear.tile import PANEL
from kernels.llama import LlamaStack
from kernels.llama.cpu import forward

Array = npt.NDArray[Any]

# Panels of the head multiplied at a time: the logits of 16 rows stay in the second-level cache.
CHUNK_PANELS = 256
NO_ROUTER = Router(
    np.empty((0, 0, PANEL), np.float32),
    np.empty(0, np.float32),
    np.empty((0, 0, PANEL), np.float32),
    np.empty(0, np.float32),
    np.zeros(1, np.int32),
)


class _Stack(NamedTuple):
    """A `LlamaStack` as nopython code takes it; the embedding as bits, shifted to float32's."""

    embedding: Array
    embedding_shift: int
    attention_norm: Array
    qkv: Array
    qkv_bias: Array
    query_norm: Array
    key_norm: Array
    attention_output: Array
    mlp_norm: Array
    gate_up: Array
    down: Array
    final_norm: Array
    cosine: Array
    sine: Array
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    window: int
    key_cache: Array
    value_cache: Array


class _Draws(NamedTuple):
    """How A rows are drawn, and with which scratch memory."""

    scale: Array  # [A]
    key: Array  # [A]
    position: Array  # [A]
    ceilings: Array  # [A, blocks of 64 ids]
    logits: Array  # [A, 16 * CHUNK_PANELS]
    maxima: Array  # [CHUNK_PANELS]
    tokens: Array  # [A] the result
    scores: Array  # [A]
    rows: Array  # [A] that were looked at


@njit(nogil=True, cache=True)
def _embed(stack, tokens, out):  # type: ignore[no-untyped-def]
    """The embeddings ``out [T, d]`` of tokens; bfloat16 bits are widened."""
    shift = np.uint32(stack.embedding_shift)
    bits = out.view(np.uint32)
    for row in range(tokens.size):
        own = stack.embedding[tokens[row]]
        for j in range(own.size):
            bits[row, j] = np.uint32(own[j]) << shift


@njit(nogil=True, cache=True)
def _put_in(stack, tokens, positions, owners, block_tables, output_rows):  # type: ignore[no-untyped-def]
    """Hidden states of ``output_rows`` of tokens, whose keys and values are written."""
    hidden = np.empty((tokens.size, stack.embedding.shape[1]), np.float32)
    _embed(stack, tokens, hidden)
    slots = np.empty(tokens.size, np.int64)
    for row in range(tokens.size):
        place = positions[row]
        block = np.int64(block_tables[owners[row], place // BLOCK_SIZE])
        slots[row] = block * BLOCK_SIZE + place % BLOCK_SIZE
    out = np.empty((output_rows.size, hidden.shape[1]), np.float32)
    forward(
        hidden,
        positions,
        slots,
        owners,
        block_tables,
        output_rows,
        stack.attention_norm,
        stack.qkv,
        stack.qkv_bias,
        stack.query_norm,
        stack.key_norm,
        stack.attention_output,
        stack.mlp_norm,
        stack.gate_up,
        stack.down,
        stack.final_norm,
        stack.cosine,
        stack.sine,
        stack.heads,
        stack.kv_heads,
        stack.head_dim,
        stack.epsilon,
        stack.scale,
        stack.window,
        stack.key_cache,
        stack.value_cache,
        out,
    )
    return out


@njit(nogil=True, cache=True)
def _put_pending_in(stack, pending, states, before):  # type: ignore[no-untyped-def]
    """Put every pending token in. Writes the last one's state into ``states [S, _, d]``, and into
    ``before [S, d]`` that of the token before it, where that was pending too."""
    sequences, total = pending.start.size, pending.tokens.size
    positions, owners = np.empty(total, np.int32), np.empty(total, np.int32)
    output_rows = np.empty(2 * sequences, np.int32)
    wanted = 0
    for sequence in range(sequences):
        first, stop = pending.offsets[sequence], pending.offsets[sequence + 1]
        for row in range(first, stop):
            positions[row] = pending.start[sequence] + row - first
            owners[row] = sequence
        if stop - first > 1 and before.shape[0] > 0:
            output_rows[wanted] = stop - 2
            wanted += 1
        output_rows[wanted] = stop - 1
        wanted += 1
    out = _put_in(
        stack, pending.tokens, positions, owners, pending.block_tables, output_rows[:wanted]
    )
    for index in range(wanted):
        row = output_rows[index]
        sequence = owners[row]
        if row == pending.offsets[sequence + 1] - 1:
            states[sequence, 0] = out[index]
        else:
            before[sequence] = out[index]


@njit(nogil=True, cache=True)
def _offer_chunk(draws, row, logits, ids):  # type: ignore[no-untyped-def]
    """Let the tokens of some panels compete for a row's guess."""
    own = logits[: ids.size]
    exclude_fillers(own, ids)
    draws.rows[row] += np.count_nonzero(ids >= 0)
    draws.tokens[row], draws.scores[row] = offer(
        own,
        ids,
        draws.scale[row],
        draws.key[row],
        draws.position[row],
        draws.ceilings[row],
        draws.maxima,
        draws.tokens[row],
        draws.scores[row],
    )


@njit(nogil=True, cache=True)
def _draw_whole(hidden, panels, ids, draws):  # type: ignore[no-untyped-def]
    """Draw for ``hidden [A, d]`` from every row of the head."""
    for first in range(0, panels.shape[0], CHUNK_PANELS):
        stop = min(first + CHUNK_PANELS, panels.shape[0])
        multiply(hidden, panels[first:stop], draws.logits, False)
        for row in range(hidden.shape[0]):
            _offer_chunk(draws, row, draws.logits[row], ids[first * PANEL : stop * PANEL])


@njit(nogil=True, cache=True)
def _draw_routed(hidden, row, panels, ids, offsets, chosen, draws):  # type: ignore[no-untyped-def]
    """Draw for ``hidden[row]`` from the chosen clusters."""
    for cluster in range(chosen.size):
        if not chosen[cluster]:
            continue
        for first in range(offsets[cluster], offsets[cluster + 1], CHUNK_PANELS):
            stop = min(first + CHUNK_PANELS, offsets[cluster + 1])
            multiply(hidden[row : row + 1], panels[first:stop], draws.logits, False)
            _offer_chunk(draws, row, draws.logits[0], ids[first * PANEL : stop * PANEL])


@njit(nogil=True, cache=True)
def _route(stack, tokens, before, router, scores):  # type: ignore[no-untyped-def]
    """``scores [A, >= M]`` for tokens [A] and the states before them [A, d]."""
    width = before.shape[1]
    features = np.empty((tokens.size, 2 * width), np.float32)
    embedded = np.empty((tokens.size, width), np.float32)
    _embed(stack, tokens, embedded)
    for row in range(tokens.size):
        features[row, :width] = embedded[row]
        features[row, width:] = before[row]
    score_clusters(
        features, router.inner, router.inner_bias, router.outer, router.outer_bias, scores
    )


@njit(nogil=True, cache=True)
def _guess(stack, panels, ids, offsets, always, router, tokens, before, hidden, step, draws):  # type: ignore[no-untyped-def]
    """One draft step of A rows: their guesses are ``draws.tokens``, -1 where there is none."""
    draws.tokens[:] = -1
    draws.scores[:] = -np.inf
    draws.rows[:] = 0
    for row in range(hidden.shape[0]):
        if draws.scale[row] > 0.0:
            fill_ceilings(draws.key[row], draws.position[row], draws.ceilings[row])
    if before.shape[0] == 0:
        _draw_whole(hidden, panels, ids, draws)
        return
    clusters = offsets.size - 1
    chosen = np.empty(clusters, np.bool_)
    scores = np.empty((tokens.size, router.outer.shape[0] * PANEL), np.float32)
    _route(stack, tokens, before, router, scores)
    budget = router.budgets[min(step, router.budgets.size - 1)]
    for row in range(hidden.shape[0]):
        choose_clusters(scores[row, :clusters], budget, always, chosen)
        _draw_routed(hidden, row, panels, ids, offsets, chosen, draws)


@njit(nogil=True, cache=True)
def _scratch(rows, panels, tokens):  # type: ignore[no-untyped-def]
    """Memory for the draws of ``rows`` rows from a head of panels, ids below ``tokens``."""
    return _Draws(
        np.empty(rows, np.float64),
        np.empty(rows, np.uint64),
        np.empty(rows, np.uint64),
        np.empty((rows, (tokens + BLOCK - 1) // BLOCK), np.float64),
        np.empty((rows, min(panels, CHUNK_PANELS) * PANEL), np.float32),
        np.empty(min(panels, CHUNK_PANELS), np.float32),
        np.empty(rows, np.int64),
        np.empty(rows, np.float64),
        np.empty(rows, np.int64),
    )


@njit(nogil=True, cache=True)
def _part(draws, rows):  # type: ignore[no-untyped-def]
    """The same memory for fewer rows."""
    return _Draws(
        draws.scale[:rows],
        draws.key[:rows],
        draws.position[:rows],
        draws.ceilings[:rows],
        draws.logits[:rows],
        draws.maxima,
        draws.tokens[:rows],
        draws.scores[:rows],
        draws.rows[:rows],
    )


@njit(nogil=True, cache=True)
def _steps(stack, pending, panels, ids, offsets, always, router, before, guesses, states, rows):  # type: ignore[no-untyped-def]
    """All draft steps. ``before [S, d]``, the states before the last pending tokens, is empty
    where no router asks for them; it is overwritten."""
    _put_pending_in(stack, pending, states, before)
    active = np.flatnonzero(pending.most > 0).astype(np.int32)
    current = pending.tokens[pending.offsets[1:] - 1][active]
    memory = _scratch(active.size, panels.shape[0], stack.embedding.shape[0])
    step = 0
    while active.size > 0:
        draws = _part(memory, active.size)
        hidden = np.empty((active.size, states.shape[2]), np.float32)
        own_before = before[active] if before.shape[0] > 0 else before
        for row in range(active.size):
            sequence = active[row]
            hidden[row] = states[sequence, step]
            count = pending.offsets[sequence + 1] - pending.offsets[sequence]
            draws.scale[row] = pending.inverse_temperature[sequence]
            draws.key[row] = pending.key[sequence]
            draws.position[row] = pending.start[sequence] + count + step
        _guess(
            stack, panels, ids, offsets, always, router, current, own_before, hidden, step, draws
        )
        left = np.zeros(active.size, np.bool_)
        for row in range(active.size):
            sequence = active[row]
            guesses[sequence, step] = draws.tokens[row]
            rows[sequence] += draws.rows[row]
            left[row] = draws.tokens[row] >= 0 and step + 1 < pending.most[sequence]
            if before.shape[0] > 0:
                before[sequence] = hidden[row]
        positions = draws.position[left].astype(np.int32)
        current = draws.tokens[left].astype(np.int32)
        active = active[left]
        step += 1
        if active.size > 0:
            every = np.arange(active.size).astype(np.int32)
            out = _put_in(stack, current, positions, active, pending.block_tables, every)
            for row in range(active.size):
                states[active[row], step] = out[row]


@njit(nogil=True, cache=True)
def _draft(  # type: ignore[no-untyped-def]
    tokens,
    pending_offsets,
    start,
    block_tables,
    most,
    key,
    inverse_temperature,
    before,
    embedding,
    embedding_shift,
    attention_norm,
    qkv,
    qkv_bias,
    query_norm,
    key_norm,
    attention_output,
    mlp_norm,
    gate_up,
    down,
    final_norm,
    cosine,
    sine,
    heads,
    kv_heads,
    head_dim,
    epsilon,
    scale,
    window,
    key_cache,
    value_cache,
    panels,
    ids,
    offsets,
    always,
    inner,
    inner_bias,
    outer,
    outer_bias,
    budgets,
    guesses,
    states,
    rows,
):
    """The place in FAULTS of what is wrong with the pending tokens, or -1 when all is done.

    One argument for each array: numba looks at a tuple of arrays in Python, which takes longer
    than a guess.
    """
    fault = pending_fault(
        tokens,
        pending_offsets,
        start,
        block_tables,
        most,
        embedding.shape[0],
        cosine.shape[0],
        key_cache.shape[1],
    )
    if fault >= 0:
        return fault
    pending = PendingTokens(
        tokens, pending_offsets, start, block_tables, most, key, inverse_temperature, before
    )
    stack = _Stack(
        embedding,
        embedding_shift,
        attention_norm,
        qkv,
        qkv_bias,
        query_norm,
        key_norm,
        attention_output,
        mlp_norm,
        gate_up,
        down,
        final_norm,
        cosine,
        sine,
        heads,
        kv_heads,
        head_dim,
        epsilon,
        scale,
        window,
        key_cache,
        value_cache,
    )
    router = Router(inner, inner_bias, outer, outer_bias, budgets)
    _steps(stack, pending, panels, ids, offsets, always, router, before, guesses, states, rows)
    return -1


def draft(stack: LlamaStack, head: DraftHead, pending: PendingTokens) -> Drafted:
    """See `kernels.draft.draft`."""
    shape, weights, embedding = stack.shape, stack.weights, stack.embedding
    shift = 16
    if embedding.dtype == np.float32:
        embedding, shift = embedding.view(np.uint32), 0
    sequences = len(pending.most)
    longest = max(int(pending.most.max(initial=0)), 0)
    guesses = np.full((sequences, longest), -1, np.int32)
    states = np.empty((sequences, max(1, longest), shape.hidden), np.float32)
    rows = np.zeros(sequences, np.int64)
    routed = head.router is not None
    fault = _draft(
        pending.tokens,
        pending.offsets,
        pending.start,
        pending.block_tables,
        pending.most,
        pending.key,
        pending.inverse_temperature,
        pending.state_before.copy() if routed else pending.state_before[:0],
        embedding,
        shift,
        weights.attention_norm,
        weights.qkv,
        weights.qkv_bias,
        weights.query_norm,
        weights.key_norm,
        weights.attention_output,
        weights.mlp_norm,
        weights.gate_up,
        weights.down,
        weights.final_norm,
        weights.cosine,
        weights.sine,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.epsilon,
        shape.scale,
        shape.window,
        stack.key_cache,
        stack.value_cache,
        head.panels,
        head.ids,
        head.offsets,
        head.always,
        *(head.router or NO_ROUTER),
        guesses,
        states,
        rows,
    )
    if fault >= 0:
        raise ValueError(FAULTS[fault])
    return Drafted(guesses, states, rows)
