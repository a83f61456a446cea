"""From traces to a hot-vocabulary file.

1. the model continues some of the texts, as it would for its users;
2. half of the sequences say which tokens are frequent: how often each occurs, plus how likely the
   model found it at their positions;
3. at positions of the other half the decision itself is measured: how much of the tail it visits
   with the most frequent ``H`` tokens as hot ones, and how long that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Body, whole_text
from lexshard.actors.body.head_weights import HeadWeights
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.decision.hot_vocabulary.file import About, HotFile, tokenizer_hash
from lexshard.actors.decision.hot_vocabulary.sizes import ROWS, decider, measure
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.hidden import spread_positions
from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.kernels.rows import canonical_logits, postprocess

Ids = tuple[int, ...]
# Continues each prompt by up to so many tokens: the model as it is served.
Continue = Callable[[Sequence[Ids], int], list[Ids]]

PROMPT_TOKENS = 64
SEQUENCES = 64  # texts that pass through the model
MOST_POSITIONS = 256
SMALLEST_SIZE = 64
SIZES = 12


def build_hot_file(
    folder: Path,
    model: LoadedModel,
    texts: Sequence[Ids],
    continue_texts: Continue,
    *,
    sources: tuple[str, ...],
    positions: int = MOST_POSITIONS,
    generated: int = 32,
    seed: int = 0,
) -> HotFile:
    """``texts`` are token ids from ``sources``. Measured at about so many ``positions``;
    ``generated`` is the number of tokens by which the model continues a text.

    Takes the body's cache: allocate it anew afterwards.
    """
    head = own_rows(model)
    vocabulary_size = head.weight.shape[0]
    length = min(PROMPT_TOKENS, model.max_positions - generated)
    spread = np.linspace(0, len(texts) - 1, min(len(texts), SEQUENCES)).round().astype(int)
    prompts = [texts[which][:length] for which in spread.tolist()]
    answers: list[Ids] = [()] * len(prompts)
    if generated:
        answers = continue_texts(prompts, generated)
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    counted, held_out = sequences[::2], sequences[1::2] or sequences

    frequency = np.zeros(vocabulary_size)
    for ids in (*texts[::2], *answers[::2]):
        np.add.at(frequency, np.array(ids, np.int64), 1.0)
    total = int(frequency.sum())
    for logits, _ in _positions(model.body, head, counted, positions):
        weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        frequency += (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    order = np.argsort(-frequency, kind="stable").astype(np.int32)

    smallest = min(SMALLEST_SIZE, vocabulary_size)
    some = np.geomspace(smallest, vocabulary_size, SIZES - 1).round().astype(np.int64)
    sizes = np.unique([0, *some.tolist()])
    visited, seconds, rows = np.zeros(len(sizes)), np.zeros(len(sizes)), 0
    for logits, histories in _positions(model.body, head, held_out, positions):
        some_visited, some_seconds = measure(decider(logits, histories), order, sizes, 0.0)
        visited += len(logits) * some_visited
        seconds += len(logits) * some_seconds
        rows += len(logits)
    about = About(
        model=folder.resolve().name,
        vocabulary_size=vocabulary_size,
        tokenizer=tokenizer_hash(folder),
        traces=sources,
        counted_tokens=total,
        generated_tokens=sum(map(len, answers)),
        positions=rows,
        seed=seed,
        sizes=tuple(sizes.tolist()),
        visited=tuple((visited / rows).tolist()),
        seconds=tuple((seconds / rows).tolist()),
    )
    return HotFile(order, about)


def _positions(
    body: Body, head: HeadWeights, sequences: Sequence[Ids], count: int
) -> Iterator[tuple[npt.NDArray[np.float32], list[Ids]]]:
    """Canonical logits [n, V] and the tokens before them at about ``count`` positions in all,
    spread evenly, up to eight at a time."""
    body.allocate_cache(max(-(-len(ids) // BLOCK_SIZE) for ids in sequences))
    each = -(-count // len(sequences))
    for ids in sequences:
        places = spread_positions(ids, each)
        with torch.inference_mode():
            hidden = body.forward(whole_text(ids, places)).float().cpu().numpy()
        for first in range(0, len(hidden), ROWS):
            products = canonical_logits(hidden[first : first + ROWS], head.weight)
            bias = None if head.bias is None else head.bias.numpy()
            logits = postprocess(products, bias=bias, scale=head.scale, softcap=head.softcap)
            yield logits, [ids[: at + 1] for at in places[first : first + ROWS].tolist()]
