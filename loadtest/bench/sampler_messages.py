"""What a scene of the sampler benchmark says to our samplers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.decision.messages import CandidateRows
from actors.messages import Request
from actors.states.deltas import Deltas, OpenSequence
from loadtest.bench.sampler_scene import Scene


def requests(scene: Scene) -> list[Request]:
    """The sequences of a scene; their outputs before step 0 are not in the requests."""
    return [
        Request(str(row), 0, tuple(prompt), scene.setting.parameters(seed=row))
        for row, prompt in enumerate(scene.prompts.tolist())
    ]


def opening(scene: Scene, rows: Sequence[int]) -> Deltas:
    """Opens the sequences of ``rows``."""
    made = requests(scene)
    return Deltas(
        opened=tuple(
            OpenSequence(row, made[row], tuple(scene.outputs[row].tolist())) for row in rows
        )
    )


def appending(scene: Scene, step: int, rows: Sequence[int]) -> Deltas:
    """What happens to the sequences of ``rows`` after a step."""
    tokens = scene.appended[step].tolist()
    return Deltas(appended=tuple((row, tokens[row]) for row in rows))


def candidate_rows(scene: Scene, step: int, rows: Sequence[int]) -> CandidateRows:
    """The candidates of some rows of a step, with their raw logits."""
    found = scene.candidates(step)
    raw = scene.logits(step)
    ids = [found[row] for row in rows]
    nucleus = scene.setting.certificate == "nucleus"
    return CandidateRows(
        tuple(rows),
        np.concatenate(ids),
        np.concatenate([raw[row, each] for row, each in zip(rows, ids, strict=True)]),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
        np.full(len(ids), nucleus),
    )
