"""What a draft model that goes step by step may draw: every token, or those that can still win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.body.head_weights import HeadWeights
from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.drafter.task import DraftTask
from lexshard.actors.head.build import build_head
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.states.need import Adjustment, Need, NeedKind
from lexshard.actors.states.row_table import RowTable
from lexshard.actors.states.sequence_state import SequenceStates


class Contest(NamedTuple):
    """Row ``r`` is drawn from ``ids[offsets[r]:offsets[r + 1]]``, sorted, by their logits.
    ``truncated`` says that these are what top-p leaves of the row."""

    ids: npt.NDArray[np.int32]  # [total]
    logits: npt.NDArray[np.float32]  # [total]
    offsets: npt.NDArray[np.int64]  # [N + 1]
    truncated: npt.NDArray[np.bool_]  # [N]


class StepHead(Protocol):
    """A draft model's output head."""

    def contest(
        self, hidden: torch.Tensor, tasks: Sequence[DraftTask], positions: Sequence[int]
    ) -> Contest:
        """Who competes to follow ``hidden [N, d]``, for ``tasks[r]`` at ``positions[r]``. Every
        token does where ``tasks[r].propose``."""


class WholeHead:
    """Every logit of the target's tokens."""

    def __init__(self, head: HeadWeights, vocabulary_size: int) -> None:
        self._head = head
        self._ids = np.arange(vocabulary_size, dtype=np.int32)

    def contest(
        self, hidden: torch.Tensor, tasks: Sequence[DraftTask], positions: Sequence[int]
    ) -> Contest:
        """See `StepHead`."""
        size = len(self._ids)
        logits = self._head.logits(hidden)[:, :size].cpu().numpy()
        offsets = np.arange(len(hidden) + 1, dtype=np.int64) * size
        whole = np.zeros(len(hidden), np.bool_)
        return Contest(np.tile(self._ids, len(hidden)), logits.ravel(), offsets, whole)


class CertifiedHead:
    """What a certified head (`actors.head`) cannot exclude: the guesses of the whole head, for the
    bytes of a low-precision copy. Ids from ``vocabulary_size`` on, the target's, never compete."""

    def __init__(self, head: OutputHead, vocabulary_size: int) -> None:
        self._head = head
        self._vocabulary_size = vocabulary_size
        self._beyond = _without(np.arange(vocabulary_size, head.vocabulary_size, dtype=np.int32))

    def contest(
        self, hidden: torch.Tensor, tasks: Sequence[DraftTask], positions: Sequence[int]
    ) -> Contest:
        """See `StepHead`."""
        needs = [
            Need(
                _need_kind(task),
                k=task.top_k,
                min_p=task.min_p,
                top_p=task.top_p,
                key=task.key,
                position=position,
                inverse_temperature=task.inverse_temperature,
                adjustment=self._beyond,
            )
            for task, position in zip(tasks, positions, strict=True)
        ]
        found = self._head.rescore(self._head.screen(hidden, RowTable.of(needs)))
        truncated = np.array([each.truncated for each in found.certificates], np.bool_)
        contest = Contest(found.ids, found.raw, found.offsets, truncated)
        return contest if self._beyond is None else _below(contest, self._vocabulary_size)


def certified_head(
    configuration: EngineConfiguration, model: LoadedModel, vocabulary_size: int
) -> CertifiedHead:
    """That of the draft ``model``, with the tiers that the target's head has. Loads the model's
    index or builds it, which takes the body's cache; raises what `build_head` raises."""
    own = replace(
        configuration, model=str(configuration.draft), index=None, head="certified", shards=1
    )
    no_states = SequenceStates(model.vocabulary_size, model.eos_token_ids, 1)
    built = build_head(model, own, no_states, lambda _: None)
    return CertifiedHead(built.head.head, vocabulary_size)


def _need_kind(task: DraftTask) -> NeedKind:
    """What the draw of a guess must know of the head."""
    if task.propose:
        return "dense"
    if not task.truncates:
        return "top1"
    if task.top_k:
        return "topk"
    return "minp" if task.min_p > 0 else "nucleus"


def _below(contest: Contest, size: int) -> Contest:
    """Without the ids from ``size`` on, which rows with every logit have, too."""
    kept = contest.ids < size
    offsets = np.concatenate([[0], np.cumsum(kept)])[contest.offsets]
    return Contest(contest.ids[kept], contest.logits[kept], offsets, contest.truncated)


def _without(banned: npt.NDArray[np.int32]) -> Adjustment | None:
    if not banned.size:
        return None
    return Adjustment(
        repetition=1.0,
        frequency=0.0,
        presence=0.0,
        tables=None,
        table=-1,
        bias_ids=np.empty(0, np.int32),
        bias_values=np.empty(0, np.float32),
        banned=banned,
        mask=None,
    )
