"""Hot vocabularies for a case of the sampler benchmark, sized as a server sizes them: by the cost
model, fitted on rows that are not measured, with the case's own controls and penalties."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.actors.decision.hot_vocabulary.sizes import calibrate, decider, size_that_pays
from lexshard.kernels.hot_vocab import Curve, skip_rate
from lexshard.loadtest.bench.sampler.workload import SamplerWorkload

SMALLEST = 64  # sizes to choose from: this times powers of two, up to half of the vocabulary
ROWS = 16  # to calibrate on


def fitted_hot_ids(
    workload: SamplerWorkload, by_frequency: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32] | None:
    """The hot tokens, sorted by id, as many as pay; None where none do."""
    size = workload.vocabulary_size
    sizes = [0]
    while (following := max(SMALLEST, 2 * sizes[-1])) <= size // 2:
        sizes.append(following)
    every = np.array(sizes, np.int64)
    histories = np.concatenate([workload.prompts, workload.outputs], axis=1).tolist()
    rows = workload.pool.calibration[:ROWS]
    chosen = [tuple(histories[row % workload.batch]) for row in range(len(rows))]
    decide = decider(rows, chosen, [workload.setting.parameters(seed=0)])
    visited = np.array([decide(np.sort(by_frequency[:hot])).mean() for hot in sizes])
    cost = calibrate(decide, by_frequency, every)
    pays = size_that_pays(Curve(every, skip_rate(every, visited, size)), cost, size)
    return np.sort(by_frequency[:pays]) if pays else None
