"""A sampler that leaves nothing to load or compile for the first decision it is asked for."""

from __future__ import annotations

import sys

import numpy as np

from lexshard.actors.decision.build import hot_ids
from lexshard.actors.decision.messages import DecisionWork, SamplerSettings
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.decision.warm_up import KINDS, warm_up_work
from lexshard.cluster.samplers.dense_slots import dense_views, slot_bytes
from lexshard.kernels import pool
from lexshard.kernels.columns import write_columns


def warm_sampler(settings: SamplerSettings) -> Sampler:
    """A new sampler in a process that is its own: threads are set for the whole process.

    Raises what `Sampler` raises, and ValueError where the hot vocabulary does not fit.
    """
    pool.set_threads(settings.threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(settings.threads)
    sampler = Sampler(settings)  # its sequences are of no server
    for columns in sorted({1, len(KINDS) * settings.threads}):
        sampler.decide(_work(settings.vocabulary_size, columns))
    return Sampler(settings, hot_ids=hot_ids(settings))


def _work(vocabulary_size: int, columns: int) -> DecisionWork:
    """Work on arrays of the types and layouts of a slot."""
    slot = np.zeros(slot_bytes(vocabulary_size, columns), np.uint8)
    logits, maxima = dense_views(slot, vocabulary_size, columns)
    write_columns(np.zeros((columns, vocabulary_size), np.float32), logits, maxima)
    return warm_up_work(logits, maxima)
