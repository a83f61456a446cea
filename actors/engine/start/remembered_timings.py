"""Timings of threads, screens and steps: measured once, remembered where nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lexshard.actors.body.batch import Body
from lexshard.actors.configuration import NGRAM, EngineConfiguration
from lexshard.actors.engine.speculation import CostTiming
from lexshard.actors.engine.threads.measurement import ThreadTiming, time_threads
from lexshard.actors.head.calibration import LadderHead, Timing, calibrate
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.remembered import (
    files_fingerprint,
    fingerprint,
    recall,
    remember,
    software_and_machine,
)
from lexshard.kernels.ahead import ONE_CALL, SEVERAL_STEPS, is_postponed

Taken = TypeVar("Taken", ThreadTiming, Timing, CostTiming)


class RememberedTimings:
    """Measures what an engine of a ``configuration`` chooses by, on a CPU; or knows it from an
    earlier start on this machine, of this software, configuration and model.

    Each configuration has a file of its own in the home folder's ``remembered``: without it the
    next start measures anew.
    """

    def __init__(self, configuration: EngineConfiguration) -> None:
        self._configuration = configuration

    def time_threads(
        self, body: Body, head: OutputHead, candidates: Sequence[int]
    ) -> list[ThreadTiming]:
        """As `actors.engine.threads.measurement.time_threads`."""

        def measure() -> list[ThreadTiming]:
            return time_threads(body, head, candidates)

        return self._known("threads", ThreadTiming, measure, tuple(candidates))

    def calibrate(
        self,
        shard: LadderHead,
        names: Sequence[str],
        hidden: npt.NDArray[np.float32],
        largest: int,
    ) -> list[Timing]:
        """As `actors.head.calibration.calibrate`."""

        def measure() -> list[Timing]:
            return calibrate(shard, names, hidden, largest)

        return self._known("screens", Timing, measure, (*names, largest))

    def measure_costs(self, measure: Callable[[], list[CostTiming]]) -> list[CostTiming]:
        """What ``measure`` finds that steps and guesses cost."""
        return self._known("costs", CostTiming, measure, ())

    def _known(
        self,
        what: str,
        kind: type[Taken],
        measure: Callable[[], list[Taken]],
        compared: Sequence[object],
    ) -> list[Taken]:
        """What was measured when ``compared`` and all else was the same, else what is measured now
        and, once all is compiled, kept."""
        if self._everything is None:
            return measure()
        name = f"{what}-{fingerprint(self._configuration)[:16]}"
        mark = fingerprint(self._everything, compared)
        kept = recall(name, mark, list[kind])  # type: ignore[valid-type]
        if kept:
            return kept
        measured = measure()
        if not any(map(is_postponed, (ONE_CALL, SEVERAL_STEPS))):  # with which steps take less
            remember(name, mark, measured)
        return measured

    @cached_property
    def _everything(self) -> str | None:
        """All that timings depend on; None where the model's files cannot be told apart."""
        models = [self._configuration.model]
        if self._configuration.draft not in (None, NGRAM):
            models.append(str(self._configuration.draft))
        folders = [Path(model).expanduser() for model in models]
        try:
            files = files_fingerprint(
                file
                for folder in folders
                for file in (folder / "config.json", *folder.glob("*.safetensors"))
            )
        except OSError:
            return None
        return fingerprint(software_and_machine(), files)
