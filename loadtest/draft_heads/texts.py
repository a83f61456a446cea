"""Texts that the target wrote, and what the draft model computes over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import whole_text
from lexshard.actors.body.fused import FusedBody
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.engine.completion import Completion, run_to_completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.actors.states.noise_key import noise_key
from lexshard.kernels.attention import BLOCK_SIZE

Tokens = tuple[int, ...]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WrittenText:
    """What the target drew after a prompt, at a temperature with a random key."""

    prompt_ids: Tokens
    output_ids: Tokens
    temperature: float
    key: int


def draftable(draft: LoadedModel) -> FusedBody:
    """The body of a model that can draft. Raises ValueError, which says why it cannot."""
    if not isinstance(draft.body, FusedBody):
        raise ValueError("this model does not run on the fused body: it cannot be a draft model")
    head = draft.head
    if head.bias is not None or head.softcap is not None or head.scale != 1.0:
        raise ValueError("a draft model's head must have no bias, no soft-cap and no scale")
    return draft.body


def complete_with_seeds(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    parameters: SamplingParameters,
    seeds: Sequence[int],
) -> list[Completion]:
    """The prompts run to their end in one continuous batch, each with a seed of its own."""
    pairs = enumerate(zip(prompts, seeds, strict=True))
    return run_to_completion(
        engine,
        [
            Request(f"seeded-{index}", 0, tuple(prompt), replace(parameters, seed=seed))
            for index, (prompt, seed) in pairs
        ],
    )


def written_texts(
    engine: Engine,
    prompts: Sequence[Tokens],
    temperature: float,
    seeds: Sequence[int],
    count: int,
) -> list[WrittenText]:
    """What an engine of the target writes after each prompt, ``count`` tokens at most."""
    parameters = SamplingParameters(temperature=temperature, max_tokens=count)
    written = complete_with_seeds(engine, prompts, parameters, seeds)
    return [
        WrittenText(done.prompt_ids, done.token_ids, temperature, noise_key(seed, 0))
        for done, seed in zip(written, seeds, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class DraftPositions:
    """Every token that the target drew, and what a draft step that guesses it starts from.

    The draft computed all N positions over the true text. That is also what it computes while
    it drafts, up to the first wrong guess, and nothing behind that counts: whether a guess stands
    after j guesses that stood needs no drafting of its own.
    """

    tokens: npt.NDArray[np.int32]  # [N] last token before the one drawn: the step's input
    embedded: Floats  # [N, d] its embedding
    before: Floats  # [N, d] final hidden state one position earlier; zeros where there is none
    hidden: Floats  # [N, d] final hidden state of the step: the head's input
    drawn: npt.NDArray[np.int32]  # [N] token that the target drew
    place: npt.NDArray[np.int64]  # [N] its index in prompt + output
    text: npt.NDArray[np.int32]  # [N] ascending; which text it belongs to
    inverse_temperature: npt.NDArray[np.float64]  # [N] 0 is greedy
    key: npt.NDArray[np.uint64]  # [N]

    def __len__(self) -> int:
        return len(self.drawn)

    def of(self, chosen: npt.NDArray[np.bool_] | slice) -> DraftPositions:
        """Those of the ``chosen`` positions."""
        return DraftPositions(
            **{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__}
        )


def draft_positions(
    body: FusedBody,
    texts: Sequence[WrittenText],
    progress: Callable[[float], None] = lambda share: None,
) -> DraftPositions:
    """The positions of all ``texts``, in their order. Takes the body's cache for itself."""
    longest = max(len(text.prompt_ids) + len(text.output_ids) for text in texts)
    body.allocate_cache(-(-longest // BLOCK_SIZE))
    parts = []
    for number, text in enumerate(texts):
        if text.output_ids:
            parts.append(_positions_of(body, text, number))
        progress(1.0 / len(texts))
    return DraftPositions(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in DraftPositions.__dataclass_fields__
        }
    )


def _positions_of(body: FusedBody, text: WrittenText, number: int) -> DraftPositions:
    ids = np.array(text.prompt_ids + text.output_ids[:-1], np.int32)
    first, count = len(text.prompt_ids) - 1, len(text.output_ids)
    wanted = np.arange(max(first - 1, 0), len(ids), dtype=np.int32)
    with torch.inference_mode():
        states = body.forward(whole_text(ids.tolist(), wanted)).numpy()
    if first == 0:
        states = np.concatenate([np.zeros((1, states.shape[1]), np.float32), states])
    inverse = np.float32(1.0 / text.temperature) if text.temperature else 0.0
    return DraftPositions(
        tokens=ids[first:],
        embedded=body.embed(ids[first:]),
        before=states[:-1],
        hidden=states[1:],
        drawn=np.array(text.output_ids, np.int32),
        place=np.arange(first + 1, first + 1 + count),
        text=np.full(count, number, np.int32),
        inverse_temperature=np.full(count, inverse, np.float64),
        key=np.full(count, text.key, np.uint64),
    )
