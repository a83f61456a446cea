"""See `kernels.steps`: its parts are the kernels of the folders around it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from lexshard.kernels.attention.layout import BLOCK_SIZE
from lexshard.kernels.certified.cpu import certified_candidates, widest
from lexshard.kernels.decision.packed import decide_packed_rows
from lexshard.kernels.draft.cpu import embed
from lexshard.kernels.llama.cpu import forward
from lexshard.kernels.masks import count_of
from lexshard.kernels.steps.questions import ENDS, FOLLOWING, MASKS, MASKS_COME
from lexshard.kernels.team.clock import now
from lexshard.kernels.team.jobs import is_kept_waiting

# What there is of a step that is not decided.
NOTHING, HIDDEN, FOUND = range(3)

_WORD = ir.IntType(64)


@intrinsic
def _ask(typing_context: Any, answering: Any, question: Any) -> Any:
    """The answer of the function at this address, which may be one of Python."""

    def code_generator(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), [values[1]])

    return types.int64(types.int64, types.int64), code_generator


@njit(nogil=True, cache=True)
def _decided(found, decision):  # type: ignore[no-untyped-def]
    """The tokens of a step, none where it is not certain of one."""
    penalties, limits, counts, noise, tables = decision
    ids, raw, offsets, members = found
    nothing = np.empty(0, np.int64)
    if not members.all():
        return nothing
    tokens = decide_packed_rows(ids, raw, offsets, penalties, limits, counts, noise, tables)
    return nothing if tokens.min() < 0 else tokens


@njit(nogil=True, cache=True)
def _any_of(tokens, stops):  # type: ignore[no-untyped-def]
    for token in tokens:
        for stop in stops:
            if token == stop:
                return True
    return False


@njit(nogil=True, cache=True)
def _is_narrow(masks, fewest):  # type: ignore[no-untyped-def]
    """Whether one of the masks holds ``fewest`` tokens or fewer."""
    if fewest > 0:
        for row in range(masks.shape[0]):
            if count_of(masks[row]) <= fewest:
                return True
    return False


@njit(nogil=True, cache=True)
def _rows(drawn, lengths, behind, places, block_tables):  # type: ignore[no-untyped-def]
    """The rows of a step: of every sequence the token that it drew, to be computed at its place,
    and ``lengths`` of the tokens ``behind``. Places move on. The tokens, the positions and slots of
    these rows, their sequences, and the last row of each."""
    total = drawn.size + lengths.sum()
    tokens, positions = np.empty(total, np.int64), np.empty(total, np.int32)
    slots, owners = np.empty(total, np.int64), np.empty(total, np.int32)
    last, row = np.empty(drawn.size, np.int32), 0
    for sequence in range(drawn.size):
        for offset in range(1 + lengths[sequence]):
            position = places[sequence]
            places[sequence] += 1
            tokens[row] = drawn[sequence] if offset == 0 else behind[sequence, offset - 1]
            block = np.int64(block_tables[sequence, position // BLOCK_SIZE])
            positions[row] = position
            slots[row] = block * BLOCK_SIZE + position % BLOCK_SIZE
            owners[row] = sequence
            row += 1
        last[sequence] = row - 1
    return tokens, positions, slots, owners, last


@njit(nogil=True, cache=True)
def take_steps(  # type: ignore[no-untyped-def]
    team,
    size,
    head_size,
    embedding,
    embedding_shift,
    embedding_scale,
    steps,
    drawn,
    places,
    block_tables,
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
    weight,
    values,
    row_scale,
    row_slack,
    block_slack,
    products,
    direction,
    hidden_limits,
    multipliers,
    low,
    fine_row_slack,
    panels,
    dense_row_slack,
    dense_block_slack,
    dense_limits,
    needs,
    adjustments,
    top_p,
    penalties,
    limits,
    counts,
    noise,
    penalty_tables,
    stops,
    answering,
    masked,
    fewest,
    patience,
    told,
    lengths,
    behind,
    most,
    room,
    hidden,
):
    """`NOTHING`, `HIDDEN` or `FOUND`, as of a step that is not decided there are ``hidden`` [N, d]
    alone, or what is found in it; the seconds of bodies; the tokens [T, N] of the T steps that are
    decided; and the fields of `kernels.certified.Certified` of their rows, one step's behind the
    other's, and of what is found. One argument for each array: see `kernels.draft.cpu._draft`."""
    count, width = drawn.size, hidden.shape[1]
    rows = steps * count
    ids, raw = np.empty(room, np.int32), np.empty(room, np.float32)
    tokens, offsets = np.empty((steps, count), np.int64), np.zeros(rows + 1, np.int64)
    thresholds, largest, best = np.empty(rows), np.empty(rows), np.empty(rows)
    weighed, refined, leaders = np.empty(rows, np.int64), np.empty(rows, np.int64), 0
    again = np.empty(rows, np.bool_)
    embedded = np.empty((count, width), np.float32)
    taken, spent, left, asked, come = 0, 0, NOTHING, now(), masked == MASKS_COME
    while taken < steps:
        began = now()
        ids_of, positions, slots, owners, last = _rows(drawn, lengths, behind, places, block_tables)
        lengths[:] = 0
        if ids_of.size != embedded.shape[0]:
            embedded = np.empty((ids_of.size, width), np.float32)
        embed(embedding, embedding_shift, embedding_scale, ids_of, embedded)
        forward(
            team,
            size,
            embedded,
            positions,
            slots,
            owners,
            block_tables,
            last,
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
            hidden,
        )
        spent += now() - began
        left = HIDDEN
        if come and _ask(answering, MASKS) == ENDS:
            break
        if masked and _is_narrow(adjustments.masks, fewest):
            break
        known, found = certified_candidates(
            team,
            head_size,
            hidden,
            weight,
            values,
            row_scale,
            row_slack,
            block_slack,
            products,
            direction,
            hidden_limits,
            multipliers,
            low,
            fine_row_slack,
            panels,
            dense_row_slack,
            dense_block_slack,
            dense_limits,
            needs,
            adjustments,
            top_p,
        )
        own, logits, own_offsets, reached, bounds, known_best, leading = found[:7]
        members, also, dense, bettered = found[7:]
        begin, first = taken * count, offsets[taken * count]
        if not known or widest(own_offsets) > most or first + own.size > room:
            break
        left = FOUND
        decision = (penalties, limits, counts, noise, penalty_tables)
        decided = _decided((own, logits, own_offsets, members), decision)
        if decided.size == 0:
            break
        left = NOTHING
        tokens[taken], drawn = decided, decided
        ids[first : first + own.size], raw[first : first + own.size] = own, logits
        offsets[begin + 1 : begin + count + 1] = own_offsets[1:] + first
        high = begin + count
        thresholds[begin:high], largest[begin:high] = reached, bounds
        best[begin:high], weighed[begin:high], refined[begin:high] = known_best, also, bettered
        again[begin:high] = dense
        leaders += leading
        taken += 1
        needs.position[:] += np.uint64(1)
        noise[1] += np.uint64(1)
        if _any_of(drawn, stops):
            break
        if taken < steps and (masked or (answering != 0 and now() - asked >= patience)):
            told[:] = drawn
            answer = _ask(answering, FOLLOWING)
            if answer == ENDS:
                break
            asked, come = now(), answer == MASKS_COME
            for row in range(count):
                needs.position[row] += np.uint64(lengths[row])
                noise[1, row] += np.uint64(lengths[row])
        if size > 1 and is_kept_waiting(team):
            size, head_size = 1, 1
    high = taken * count
    filled = offsets[high]
    return (
        left,
        spent / 1e9,
        tokens[:taken],
        (
            ids[:filled],
            raw[:filled],
            offsets[: high + 1],
            thresholds[:high],
            largest[:high],
            best[:high],
            leaders,
            np.ones(high, np.bool_),
            weighed[:high],
            again[:high],
            refined[:high],
        ),
        found,
    )
