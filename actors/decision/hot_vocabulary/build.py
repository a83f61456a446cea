"""From traces to a hot-vocabulary file.

1. the model continues some of the texts, as it would for its users;
2. half of the sequences say which tokens are frequent: how often each occurs, plus how often the
   model would draw it at their positions;
3. at positions of the other half the decision itself is measured: how much of the tail it visits
   with the most frequent ``H`` tokens as hot ones, and how long that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.batch import Body, whole_text
from lexshard.actors.body.head_weights import HeadWeights
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.decision.hot_vocabulary.file import About, HotFile, tokenizer_hash
from lexshard.actors.decision.hot_vocabulary.measurement import measure
from lexshard.actors.decision.hot_vocabulary.traces import Traces
from lexshard.actors.index.build import own_rows
from lexshard.actors.index.steps import Progress
from lexshard.kernels.attention import BLOCK_SIZE
from lexshard.kernels.hot_vocab import fit_cost, target_distribution
from lexshard.kernels.rows import canonical_logits, postprocess

Ids = tuple[int, ...]
# Continues each prompt by up to so many tokens: the model as it is served.
Continue = Callable[[Sequence[Ids], int], list[Ids]]

PROMPT_TOKENS = 64
SEQUENCES = 64  # texts that pass through the model
FIRST_POSITION = 4  # the very first tokens have no context worth the name
ROWS = 16  # hidden states at a time
# Exact products of the default number of positions: about a minute on one core.
AFFORDABLE_PRODUCTS = 4e10
MOST_POSITIONS, FEWEST_POSITIONS = 256, 32
SMALLEST_SIZE = 64
SIZES = 12


@dataclass(frozen=True, slots=True)
class HotVocabularySettings:
    """``positions`` None is as many as take about a minute, at most 256; ``generated`` is the
    number of tokens by which the model continues a text."""

    positions: int | None = None
    generated: int = 32
    seed: int = 0


def affordable_positions(rows: int, columns: int) -> int:
    """How many positions are measured where nobody says: rows and columns of the output head."""
    wanted = int(AFFORDABLE_PRODUCTS / (rows * columns))
    return max(FEWEST_POSITIONS, min(MOST_POSITIONS, wanted))


def build_hot_file(
    folder: Path,
    model: LoadedModel,
    traces: Traces,
    continue_texts: Continue,
    settings: HotVocabularySettings,
    progress: Progress,
) -> HotFile:
    """Takes the body's cache: allocate it anew afterwards."""
    head = own_rows(model)
    vocabulary_size, columns = head.weight.shape
    positions = settings.positions or affordable_positions(vocabulary_size, columns)
    progress.begin("generating")
    length = min(PROMPT_TOKENS, model.max_positions - settings.generated)
    prompts = [text[:length] for text in _spread(traces.texts, SEQUENCES)]
    answers: list[Ids] = [()] * len(prompts)
    if settings.generated:
        answers = continue_texts(prompts, settings.generated)
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    counted, held_out = sequences[::2], sequences[1::2] or sequences

    progress.begin("frequencies")
    frequency = np.zeros(vocabulary_size)
    for ids in (*traces.texts[::2], *answers[::2]):
        np.add.at(frequency, np.array(ids, np.int64), 1.0)
    total = int(frequency.sum())
    for logits in _logit_blocks(model.body, head, counted, positions):
        for row in logits:
            frequency += target_distribution(row, inverse_temperature=1.0)
    order = np.argsort(-frequency, kind="stable").astype(np.int32)

    progress.begin("held-out positions")
    chosen = _positions(held_out, positions)
    histories = [
        ids[: at + 1] for ids, places in zip(held_out, chosen, strict=True) for at in places
    ]
    rows = np.concatenate(list(_logit_blocks(model.body, head, held_out, positions)))
    progress.begin("sizes")
    sizes = _sizes(vocabulary_size)
    measured = measure(rows, histories, order, sizes, settings.seed, progress.advance)
    visited, seconds = (
        np.mean([getattr(part, what) for part in measured.mix], axis=0)
        for what in ("visited", "seconds")
    )
    about = About(
        model=folder.resolve().name,
        vocabulary_size=vocabulary_size,
        tokenizer=tokenizer_hash(folder),
        traces=traces.sources,
        counted_tokens=total,
        generated_tokens=sum(map(len, answers)),
        positions=len(rows),
        seed=settings.seed,
        sizes=tuple(sizes.tolist()),
        hit_rate=tuple(measured.hit_rate.tolist()),
        mix=measured.mix,
        cost=fit_cost(sizes, visited, seconds),
    )
    return HotFile(order, about)


def _sizes(vocabulary_size: int) -> npt.NDArray[np.int64]:
    """0, and from 64 to the whole vocabulary in equal ratios."""
    smallest = min(SMALLEST_SIZE, vocabulary_size)
    some = np.geomspace(smallest, vocabulary_size, SIZES - 1).round().astype(np.int64)
    return np.unique([0, *some.tolist()])


def _spread(texts: Sequence[Ids], count: int) -> list[Ids]:
    """At most ``count`` texts, spread evenly."""
    if len(texts) <= count:
        return list(texts)
    return [texts[i] for i in np.linspace(0, len(texts) - 1, count).round().astype(int)]


def _positions(sequences: Sequence[Ids], count: int) -> list[npt.NDArray[np.int32]]:
    """Per sequence the positions that are looked at: about ``count`` in all, spread evenly."""
    every = [
        (which, at)
        for which, ids in enumerate(sequences)
        for at in range(min(FIRST_POSITION, len(ids) - 1), len(ids))
    ]
    taken = np.unique(np.linspace(0, len(every) - 1, min(count, len(every))).round().astype(int))
    chosen: list[list[int]] = [[] for _ in sequences]
    for index in taken.tolist():
        which, at = every[index]
        chosen[which].append(at)
    return [np.array(places, np.int32) for places in chosen]


def _logit_blocks(
    body: Body, head: HeadWeights, sequences: Sequence[Ids], count: int
) -> Iterator[npt.NDArray[np.float32]]:
    """Canonical logits [n, V] of about ``count`` positions, sequence by sequence."""
    body.allocate_cache(max(-(-len(ids) // BLOCK_SIZE) for ids in sequences))
    for ids, places in zip(sequences, _positions(sequences, count), strict=True):
        if len(places):
            with torch.inference_mode():
                hidden = body.forward(whole_text(ids, places)).float().cpu().numpy()
            for first in range(0, len(hidden), ROWS):
                products = canonical_logits(hidden[first : first + ROWS], head.weight)
                bias = None if head.bias is None else head.bias.numpy()
                yield postprocess(products, bias=bias, scale=head.scale, softcap=head.softcap)
