"""Sampler processes that misbehave: ``sampler_stand_in.py HOW``, told what the real one is.

Their token is the largest logit of the row.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from lexshard.actors.decision.messages import DecisionResult, DecisionWork, SamplerSettings
from lexshard.actors.messages import RowDecision
from lexshard.cluster.samplers.main import main

SLOW_SECONDS = 0.3
THOUGHTFUL_SECONDS = 2.5


class StandIn:
    def __init__(self, settings: SamplerSettings, how: str) -> None:
        self._how = how
        if how == "unmakeable":
            raise ValueError("no such hot vocabulary")
        if how == "stillborn":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped at birth":
            os.kill(os.getpid(), signal.SIGSTOP)

    def decide(self, work: DecisionWork) -> DecisionResult:
        if self._how == "stopping":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._how == "thoughtful":
            time.sleep(THOUGHTFUL_SECONDS)
        if self._how == "slow":
            time.sleep(SLOW_SECONDS)
        if work.deltas.closed == (1,):
            raise ValueError("this cannot be asked")
        if work.deltas.closed == (2,):
            raise KeyError("a fault of ours")
        tokens: list[int] = []
        if work.candidates is not None:
            rows = np.split(work.candidates.raw, work.candidates.offsets[1:-1])
            tokens += [int(row.argmax()) for row in rows]
        if work.dense is not None:
            tokens += work.dense.logits.argmax(axis=1).tolist()
        decisions = tuple(RowDecision(token) for token in tokens)
        return DecisionResult(work.step, decisions, 0.0)


if __name__ == "__main__":
    main(lambda settings: StandIn(settings, sys.argv[1]))
