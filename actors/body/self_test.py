"""What a body must prove when it is loaded: right, and whether a row's bits are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from lexshard.actors.body.attention_step import AttentionSettings
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.errors import SelfTestError, UnsupportedModelError
from lexshard.kernels.attention import BLOCK_SIZE

LENGTHS = (14, 7, 19)  # tokens per sequence: one block, part of one, more than one
BLOCKS = 8
# Two placements of the sequences' blocks (two blocks each), so that places are known not to matter.
_TABLES = (((5, 2), (7, 0), (3, 6)), ((0, 1), (2, 3), (4, 5)))

# Largest difference to the plain forward pass, relative to the largest value. In bfloat16 two
# correct implementations differ by a few roundings of 2**-8, in float16 of 2**-11.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}

Piece = tuple[int, int, int]  # sequence, first position, one past the last


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The plain forward pass of every test sequence."""

    token_ids: tuple[tuple[int, ...], ...]
    hidden: tuple[torch.Tensor, ...]  # [length, d] float32 each
    logits: tuple[torch.Tensor, ...]  # [length, V] float32 each


def plain_forward(model: Any) -> Expected:
    """Run the untouched transformers model, sequence by sequence, without a cache."""
    config = model.config.get_text_config(decoder=True)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    longest = config.max_position_embeddings
    ids = [
        tuple((17 * sequence + 7 * i + 3) % vocabulary for i in range(min(length, longest)))
        for sequence, length in enumerate(LENGTHS)
    ]
    hidden = plain_hidden(model, ids)
    logits = []
    with torch.inference_mode():
        for tokens in ids:
            row = torch.tensor([tokens], device=model.device)
            logits.append(model(input_ids=row, use_cache=False).logits[0].float())
    return Expected(tuple(ids), hidden, tuple(logits))


def plain_hidden(model: Any, token_ids: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """Hidden states ``[length, d]`` of every sequence, in float32."""
    hidden = []
    with torch.inference_mode():
        for tokens in token_ids:
            row = torch.tensor([tokens], device=model.device)
            hidden.append(model.base_model(input_ids=row, use_cache=False).last_hidden_state[0])
    return tuple(each.float() for each in hidden)


def pack_batch(
    token_ids: Sequence[Sequence[int]], pieces: Sequence[Piece], tables: Sequence[Sequence[int]]
) -> Batch:
    """One step that computes the pieces, in order, and wants every row."""
    tokens = [token_ids[s][p] for s, start, stop in pieces for p in range(start, stop)]
    positions = [p for _, start, stop in pieces for p in range(start, stop)]
    owners = [s for s, start, stop in pieces for _ in range(start, stop)]
    slots = [
        tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for s, p in zip(owners, positions, strict=True)
    ]
    return Batch(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int64),
        row_sequence=np.array(owners, np.int32),
        block_tables=np.array(tables, np.int32),
        output_rows=np.arange(len(tokens), dtype=np.int32),
    )


class StepBody(Protocol):
    """As much of a `Body` as a check takes."""

    @property
    def name(self) -> str: ...

    def allocate_cache(self, num_blocks: int) -> None: ...

    def forward(self, batch: Batch) -> torch.Tensor: ...


def run_mixed(body: StepBody, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Chunks and single tokens of all sequences, mixed in shared steps: ``[length, d]`` each."""
    body.allocate_cache(BLOCKS)
    lengths = [len(tokens) for tokens in token_ids]
    found: list[list[torch.Tensor]] = [[] for _ in token_ids]
    done = [0] * len(token_ids)
    sizes = ((5, 3, 11), (1, 2, 1), (6, 1, 1), (1, 1, 4), (14, 7, 19))
    for chunk_sizes in sizes:
        pieces = [
            (s, done[s], min(lengths[s], done[s] + size))
            for s, size in enumerate(chunk_sizes)
            if done[s] < lengths[s]
        ]
        if not pieces:
            break
        hidden = body.forward(pack_batch(token_ids, pieces, _TABLES[0]))
        first = 0
        for s, start, stop in pieces:
            found[s].append(hidden[first : first + stop - start])
            first += stop - start
            done[s] = stop
    return [torch.cat(parts) for parts in found]


def run_alone(body: StepBody, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Every sequence in one step of its own: ``[length, d]`` each."""
    body.allocate_cache(BLOCKS)
    return [
        body.forward(pack_batch(token_ids, [(s, 0, len(tokens))], _TABLES[1]))
        for s, tokens in enumerate(token_ids)
    ]


def check_hidden(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    of: str,
    against: str,
    tolerance: float,
    *,
    typical: bool = False,
) -> None:
    """Raises SelfTestError where hidden states ``of`` something differ from those that are
    ``expected`` by more than ``tolerance``, relative to the largest value; where the ``typical``
    difference counts, both by their root mean square."""
    differences, values = torch.cat(list(found)) - torch.cat(list(expected)), torch.cat([*expected])
    if typical:
        difference, size = (float(each.square().mean().sqrt()) for each in (differences, values))
    else:
        difference, size = (float(each.abs().max()) for each in (differences, values))
    if not difference <= tolerance * size:  # NaN must fail
        words = ("typically", "a typical") if typical else ("by up to", "the largest")
        raise SelfTestError(
            f"hidden states of {of}, differ from {against} {words[0]} {difference:.3g} "
            f"({words[1]} value is {size:.3g}): the model keeps state or attends in a way that "
            "paged attention does not compute; choose another model"
        )


def check_body(
    body: StepBody,
    token_ids: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    against: str,
    tolerance: float,
    *,
    typical: bool = False,
) -> bool:
    """Whether the body is batch-invariant, once it is known to be right.

    Raises as `check_hidden` does, by the ``typical`` difference or the largest. Leaves the body
    with a test cache: allocate anew.
    """
    mixed, alone = run_mixed(body, token_ids), run_alone(body, token_ids)
    for how, found in (("in one piece", alone), ("in chunks of mixed batches", mixed)):
        of = f"the {body.name} body, computed {how}"
        check_hidden(found, expected, of, against, tolerance, typical=typical)
    return all(torch.equal(a, b) for a, b in zip(mixed, alone, strict=True))


def check_attention(ours: Sequence[AttentionSettings], asked: Sequence[AttentionSettings]) -> None:
    """A body's own settings of every layer must be those that the model asks for: short test
    sequences show no window. Raises SelfTestError."""
    for layer, (own, model) in enumerate(zip(ours, asked, strict=True)):
        if own != model:
            raise SelfTestError(
                f"layer {layer} attends by {own} and the model asks for {model}: use body=general"
            )


def check_windows(settings: Sequence[AttentionSettings], config: Any) -> None:
    """Sliding layers must have asked for their window, and no others: short test sequences cannot
    show it.

    ``settings`` are those of every layer. Raises UnsupportedModelError.
    """
    windows = [each.window for each in settings]
    kinds = getattr(config, "layer_types", None) or ()
    if any(windows) and not hasattr(type(config), "sliding_window"):
        raise UnsupportedModelError(
            f"layers look back {max(windows)} tokens by a sliding_window that is no field of "
            f"{type(config).__name__}, so that no mask of transformers has it: remove it from "
            "config.json"
        )
    if not kinds and getattr(config, "sliding_window", None) and not any(windows):
        raise UnsupportedModelError(
            f"the model has a sliding window of {config.sliding_window} tokens but no layer tells "
            "its attention: choose a model of another family"
        )
    for layer, kind in enumerate(kinds[: len(windows)]):
        if kind == "sliding_attention" and windows[layer] == 0:
            raise UnsupportedModelError(
                f"layer {layer} is a sliding-window layer but does not tell its attention the "
                "window: choose a model of another family"
            )
