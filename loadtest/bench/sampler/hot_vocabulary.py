"""Hot vocabularies for a case of the sampler benchmark, sized as a server sizes them: by the cost
model, fitted on rows that are not measured, with the case's own controls and penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.hot_vocabulary import HotVocabulary
from lexshard.actors.decision.hot_vocabulary.measurement import Columns, columns_of
from lexshard.kernels.hot_vocab import Cost, Curve, best_size, skip_rate
from lexshard.loadtest.bench.sampler.workload import SamplerWorkload

SMALLEST = 64  # sizes to choose from: this times powers of two, up to half of the vocabulary
ROWS = 16  # to calibrate on


def fitted_hot_vocabulary(
    workload: SamplerWorkload, by_frequency: npt.NDArray[np.int32]
) -> HotVocabulary:
    """For the draw that is served: skipped tokens are counted, and the cost of a visit is timed."""
    size, sizes = workload.vocabulary_size, _sizes(workload.vocabulary_size)
    columns = _columns(workload)
    sets = [np.sort(by_frequency[:hot]) for hot in sizes.tolist()]
    visited = np.array([columns.decide(hot_ids).mean() for hot_ids in sets])
    curve = Curve(sizes, skip_rate(sizes, visited, size))
    hot = HotVocabulary(by_frequency, size, curve, Cost(0.0, 1.0))
    # Where all tokens are looked at whatever is hot (a wide nucleus), there is nothing to fit.
    if np.ptp(sizes + visited) > 0:
        hot.calibrate(columns.decide)
    return hot


def mixture_hot_ids(
    workload: SamplerWorkload, by_frequency: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """For the paper's mixture: the whole tail is visited when the hot tokens are rejected, so that
    the expected hot mass decides. Sorted; at least the smallest size."""
    sizes = _sizes(workload.vocabulary_size)
    by_rank = np.cumsum(_columns(workload).masses()[:, by_frequency].mean(axis=0))
    mass = np.concatenate([[0.0], by_rank[sizes[1:] - 1]])
    best = best_size(Curve(sizes, mass), Cost(0.0, 1.0), workload.vocabulary_size)
    return np.sort(by_frequency[: max(best, SMALLEST)])


def _columns(workload: SamplerWorkload) -> Columns:
    histories = np.concatenate([workload.prompts, workload.outputs], axis=1).tolist()
    rows = workload.pool.calibration[:ROWS]
    chosen = [tuple(histories[row % workload.batch]) for row in range(len(rows))]
    return columns_of(rows, chosen, [workload.setting.parameters(seed=0)] * len(rows))


def _sizes(vocabulary_size: int) -> npt.NDArray[np.int64]:
    sizes = [0]
    while (following := max(SMALLEST, 2 * sizes[-1])) <= vocabulary_size // 2:
        sizes.append(following)
    return np.array(sizes, np.int64)
