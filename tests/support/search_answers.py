"""What a search must find, by looking at every token."""

from __future__ import annotations

import numpy as np

from lexshard.actors.states.need import Need
from lexshard.kernels.truncate.reference import best_ids


def answer(need: Need, ids: np.ndarray, logits: np.ndarray) -> list[int]:
    """The tokens that a need is about, in order, by brute force over the given ones."""
    from lexshard.kernels.noise import gumbel_noise

    ids, logits = ids[logits > -np.inf], logits[logits > -np.inf]
    if not len(ids):
        return []
    scaled = logits.astype(np.float64) * need.inverse_temperature
    if need.kind == "topk":
        return ids[best_ids(logits, need.k)].tolist()
    if need.kind == "minp":
        return ids[scaled >= scaled.max() + np.log(need.min_p)].tolist()
    if need.inverse_temperature == 0:
        return [int(ids[np.argmax(logits)])]
    noise = gumbel_noise(need.key, need.position, ids, implementation="reference")
    return [int(ids[np.argmax(scaled + noise)])]
