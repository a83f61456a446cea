"""All draft steps of a batch in one native call: body, head, noise, choice, and the next step.

A row's arithmetic is independent of the rows beside it (`kernels.llama`, `kernels.linear`), and
the largest score is the same in any order, so a guess is a function of its own sequence.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.draft.checks import FAULTS, pending_fault
from lexshard.kernels.draft.draw import begin_row, drawn_rows, offer, settle
from lexshard.kernels.draft.routing import choose_clusters, score_clusters
from lexshard.kernels.draft.types import Drafted, DraftHead, PendingTokens, Router
from lexshard.kernels.linear.cpu import multiply, multiply_panels
from lexshard.kernels.linear.tile import PANEL
from lexshard.kernels.llama import LlamaStack
from lexshard.kernels.llama.cpu import forward

# Panels of the head multiplied at a time: the logits of 16 rows stay in the second-level cache.
CHUNK_PANELS = 256
NO_ROUTER = Router(
    np.empty((0, 0, PANEL), np.float32),
    np.empty(0, np.float32),
    np.empty((0, 0, PANEL), np.float32),
    np.empty(0, np.float32),
    np.zeros(1, np.int32),
)


@njit(nogil=True, cache=True)
def embed(embedding, shift, scale, tokens, out):  # type: ignore[no-untyped-def]
    """The scaled embeddings ``out [T, >= d]`` of tokens; bfloat16 bits are widened."""
    bits = out.view(np.uint32)
    for row in range(tokens.size):
        token = tokens[row]
        for j in range(embedding.shape[1]):
            bits[row, j] = np.uint32(embedding[token, j]) << np.uint32(shift)
            out[row, j] *= np.float32(scale)


@njit(nogil=True, cache=True)
def _lay_out(offsets, start, routed, positions, owners, output_rows):  # type: ignore[no-untyped-def]
    """Where the pending tokens go, and how many of their hidden states are wanted: of each
    sequence that of the last, and where a router asks for it that of the token before."""
    wanted = 0
    for sequence in range(start.size):
        first, stop = offsets[sequence], offsets[sequence + 1]
        for row in range(first, stop):
            positions[row] = start[sequence] + row - first
            owners[row] = sequence
        if routed and stop - first > 1:
            output_rows[wanted] = stop - 2
            wanted += 1
        output_rows[wanted] = stop - 1
        wanted += 1
    return wanted


@njit(nogil=True, cache=True)
def _find_slots(positions, owners, block_tables, slots):  # type: ignore[no-untyped-def]
    for row in range(positions.size):
        place = positions[row]
        block = np.int64(block_tables[owners[row], place // BLOCK_SIZE])
        slots[row] = block * BLOCK_SIZE + place % BLOCK_SIZE


@njit(nogil=True, cache=True)
def _keep_states(out, output_rows, owners, step, states, before):  # type: ignore[no-untyped-def]
    """The last hidden state of each sequence is that of ``step``; one ahead of it is ``before``."""
    for index in range(output_rows.size):
        owner = owners[output_rows[index]]
        last = index + 1 == output_rows.size or owners[output_rows[index + 1]] != owner
        for j in range(out.shape[1]):
            if last:
                states[owner, step, j] = out[index, j]
            else:
                before[owner, j] = out[index, j]


@njit(nogil=True, cache=True)
def _record(logits, recorded, sequence, step, first):  # type: ignore[no-untyped-def]
    """Keep what one guess was drawn from, where that is wanted."""
    if recorded.shape[0] > 0:
        for index in range(logits.size):
            recorded[sequence, step, first + index] = logits[index]


@njit(nogil=True, cache=True)
def _forget_truncated(kept, recorded, sequence, step):  # type: ignore[no-untyped-def]
    """Of a truncated guess, only what it was drawn from stays recorded."""
    if recorded.shape[0] > 0:
        own = recorded[sequence, step]
        logits = own[kept]
        own[:] = -np.inf
        for index in range(kept.size):
            own[kept[index]] = logits[index]


@njit(nogil=True, cache=True)
def _draw_whole(hidden, panels, ids, logits, drawn, active, step, recorded):  # type: ignore[no-untyped-def]
    """Draw for ``hidden [A, d]`` from every row of the head."""
    chunk = logits.shape[1] // PANEL
    for first in range(0, panels.shape[0], chunk):
        count = min(chunk, panels.shape[0] - first)
        multiply(hidden, panels[first : first + count], logits, False)
        own = ids[first * PANEL : (first + count) * PANEL]
        for row in range(hidden.shape[0]):
            offer(logits[row, : count * PANEL], own, first * PANEL, drawn, row)
            _record(logits[row, : count * PANEL], recorded, active[row], step, first * PANEL)


@njit(nogil=True, cache=True)
def _draw_routed(  # type: ignore[no-untyped-def]
    hidden, panels, ids, offsets, chosen, logits, drawn, row, sequence, step, recorded
):
    """Draw for ``hidden [1, d]`` from the chosen clusters, neighbours together."""
    clusters = chosen.size
    cluster = 0
    while cluster < clusters:
        if not chosen[cluster]:
            cluster += 1
            continue
        first = np.int64(offsets[cluster])
        while cluster < clusters and chosen[cluster]:
            cluster += 1
        stop = np.int64(offsets[cluster])
        multiply_panels(hidden, panels, logits, False, first, stop)
        if stop > first:
            own = slice(first * PANEL, stop * PANEL)
            offer(logits[0, own], ids[own], first * PANEL, drawn, row)
            _record(logits[0, own], recorded, sequence, step, first * PANEL)


@njit(nogil=True, cache=True)
def _route(embedding, shift, scale, tokens, before, router, scores):  # type: ignore[no-untyped-def]
    """``scores [A, >= M]`` for the tokens put in [A] and the states before them [A, d]."""
    width = before.shape[1]
    features = np.empty((tokens.size, 2 * width), np.float32)
    embed(embedding, shift, scale, tokens, features)
    for row in range(tokens.size):
        for j in range(width):
            features[row, width + j] = before[row, j]
    score_clusters(
        features, router.inner, router.inner_bias, router.outer, router.outer_bias, scores
    )


@njit(nogil=True, cache=True)
def _draft(  # type: ignore[no-untyped-def]
    tokens,
    pending_offsets,
    start,
    block_tables,
    most,
    key,
    inverse_temperature,
    top_k,
    top_p,
    log_min_p,
    before,
    embedding,
    embedding_shift,
    embedding_scale,
    attention_norm,
    qkv,
    qkv_bias,
    query_norm,
    key_norm,
    attention_output,
    attended_norm,
    mlp_norm,
    gate_up,
    down,
    inner_norm,
    final_norm,
    cosine,
    sine,
    tables,
    windows,
    heads,
    kv_heads,
    head_dim,
    epsilon,
    scale,
    softcap,
    activation,
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
    recorded,
):
    """The place in FAULTS of what is wrong with the pending tokens, or -1 when all is done.

    One argument for each array: numba takes tuples of arrays apart in Python, and passing them on
    makes compilation much longer.
    """
    fault = pending_fault(
        tokens,
        pending_offsets,
        start,
        block_tables,
        most,
        embedding.shape[0],
        cosine.shape[1],
        key_cache.shape[1],
    )
    if fault >= 0:
        return fault
    no_team = np.zeros(1, np.int64)
    routed = before.shape[0] > 0
    sequences, width = start.size, states.shape[2]
    positions, owners = np.empty(tokens.size, np.int32), np.empty(tokens.size, np.int32)
    output_rows = np.empty(2 * sequences, np.int32)
    wanted = _lay_out(pending_offsets, start, routed, positions, owners, output_rows)
    output_rows = output_rows[:wanted]
    # Of the sequences drawn for: which they are, the token put in last, the place of the next.
    active, last = np.empty(sequences, np.int32), np.empty(sequences, np.int32)
    places = np.empty(sequences, np.int32)
    count = 0
    for sequence in range(sequences):
        if most[sequence] > 0:
            stop = pending_offsets[sequence + 1]
            active[count], last[count] = sequence, tokens[stop - 1]
            places[count] = start[sequence] + stop - pending_offsets[sequence]
            count += 1
    chunk = panels.shape[0] if routed else min(panels.shape[0], CHUNK_PANELS)
    logits = np.empty((1 if routed else count, chunk * PANEL), np.float32)
    truncated = (top_k > 0) | (top_p < 1.0) | (log_min_p > -np.inf)
    held = panels.shape[0] if truncated.any() else 0
    drawn = drawn_rows(count, embedding.shape[0], chunk, held)
    router = Router(inner, inner_bias, outer, outer_bias, budgets)
    scores = np.empty((count, outer.shape[0] * PANEL), np.float32)
    chosen = np.empty(outer_bias.size, np.bool_)
    step = 0
    while True:
        hidden = np.empty((tokens.size, width), np.float32)
        embed(embedding, embedding_shift, embedding_scale, tokens, hidden)
        slots = np.empty(tokens.size, np.int64)
        _find_slots(positions, owners, block_tables, slots)
        out = np.empty((output_rows.size, width), np.float32)
        forward(
            no_team,
            np.int64(1),  # of the type that steps call it with: compiled once
            hidden,
            positions,
            slots,
            owners,
            block_tables,
            output_rows,
            attention_norm,
            qkv,
            qkv_bias,
            query_norm,
            key_norm,
            attention_output,
            attended_norm,
            mlp_norm,
            gate_up,
            down,
            inner_norm,
            final_norm,
            cosine,
            sine,
            tables,
            windows,
            heads,
            kv_heads,
            head_dim,
            epsilon,
            scale,
            softcap,
            activation,
            key_cache,
            value_cache,
            out,
        )
        _keep_states(out, output_rows, owners, step, states, before)
        if count == 0:
            return -1
        hidden = np.empty((count, width), np.float32)
        for row in range(count):
            sequence = active[row]
            begin_row(
                drawn,
                row,
                inverse_temperature[sequence],
                key[sequence],
                np.uint64(places[row]),
                truncated[sequence],
            )
            for j in range(width):
                hidden[row, j] = states[sequence, step, j]
        if routed:
            own_before = np.empty((count, width), np.float32)
            for row in range(count):
                for j in range(width):
                    sequence = active[row]
                    own_before[row, j] = (
                        states[sequence, step - 1, j] if step > 0 else before[sequence, j]
                    )
            own = last[:count]
            _route(embedding, embedding_shift, embedding_scale, own, own_before, router, scores)
            for row in range(count):
                choose_clusters(scores[row], budgets[min(step, budgets.size - 1)], always, chosen)
                _draw_routed(
                    hidden[row : row + 1],
                    panels,
                    ids,
                    offsets,
                    chosen,
                    logits,
                    drawn,
                    row,
                    active[row],
                    step,
                    recorded,
                )
        else:
            _draw_whole(hidden, panels, ids, logits, drawn, active, step, recorded)
        left = 0
        for row in range(count):
            sequence = active[row]
            if drawn.held[row] >= 0:
                kept = settle(
                    drawn, row, ids, top_k[sequence], top_p[sequence], log_min_p[sequence]
                )
                _forget_truncated(kept, recorded, sequence, step)
            guesses[sequence, step] = drawn.token[row]
            rows[sequence] += drawn.seen[row]
            if drawn.token[row] >= 0 and step + 1 < most[sequence]:
                active[left], last[left] = sequence, drawn.token[row]
                places[left] = places[row] + 1
                left += 1
        if left == 0:
            return -1
        count = left
        step += 1
        tokens, owners = last[:count].copy(), active[:count].copy()
        positions, output_rows = places[:count] - np.int32(1), np.empty(count, np.int32)
        for row in range(count):
            output_rows[row] = row


def draft(stack: LlamaStack, head: DraftHead, pending: PendingTokens) -> Drafted:
    """See `kernels.draft.draft`."""
    embedding, shift = stack.embedding, 16
    if embedding.dtype == np.float32:
        embedding, shift = embedding.view(np.uint32), 0
    sequences = len(pending.most)
    longest = max(int(pending.most.max(initial=0)), 0)
    guesses = np.full((sequences, longest), -1, np.int32)
    states = np.empty((sequences, max(1, longest), stack.shape.hidden), np.float32)
    rows = np.zeros(sequences, np.int64)
    room = (sequences, longest, len(head.ids)) if pending.record else (0, 0, 0)
    recorded = np.full(room, -np.inf, np.float32)
    routed = head.router is not None
    fault = _draft(
        *pending[:10],
        pending.state_before.copy() if routed else pending.state_before[:0],
        embedding,
        shift,
        float(stack.shape.embedding_scale),
        *stack.weights,
        *stack.shape.constants,
        stack.key_cache,
        stack.value_cache,
        *head[:4],
        *(head.router or NO_ROUTER),
        guesses,
        states,
        rows,
        recorded,
    )
    if fault >= 0:
        raise ValueError(FAULTS[fault])
    return Drafted(guesses, states, rows, recorded)
