"""A sampler that leaves nothing to load or compile for the first decision it is asked for."""

from __future__ import annotations

import sys

import numpy as np

from lexshard.actors.decision.build import hot_ids
from lexshard.actors.decision.messages import DecisionWork, SamplerSettings
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.decision.warm_up import KINDS, warm_up_work
from lexshard.cluster.samplers.dense_slots import slot_bytes, write_dense
from lexshard.kernels import pool
from lexshard.kernels.cached_code import load_code_alone


def warm_sampler(settings: SamplerSettings) -> Sampler:
    """A new sampler in a process that is its own: threads are set for the whole process, and how
    kernels are loaded.

    Raises what `Sampler` raises, and ValueError where the hot vocabulary does not fit.
    """
    load_code_alone()
    pool.set_threads(settings.threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(settings.threads)
    sampler = Sampler(settings)  # its sequences are of no server
    for rows in sorted({1, len(KINDS) * settings.threads}):
        sampler.decide(_work(settings.vocabulary_size, rows))
    return Sampler(settings, hot_ids=hot_ids(settings))


def _work(vocabulary_size: int, rows: int) -> DecisionWork:
    """Work on arrays of the types of a slot."""
    slot = np.zeros(slot_bytes(vocabulary_size, rows), np.uint8)
    return warm_up_work(*write_dense(slot, np.zeros((rows, vocabulary_size), np.float32)))
