"""One step of the head on a device: fixed buffers for so many rows, and the graph that fills them.

On a CUDA device the whole search (screen, leaders, threshold, candidates, canonical products) is
one CUDA graph: a step is a few small copies, one launch and one copy back, and nothing in between
waits for the host. Elsewhere (Triton's interpreter) the same launches run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from lexshard.kernels.draw import Controls
from lexshard.kernels.penalties import Adjustments
from lexshard.kernels.screen import Screened
from lexshard.kernels.search import Needs
from lexshard.kernels.search.gpu.packing import PackedSupport, pack_questions, pack_support
from lexshard.kernels.search.gpu.search import (
    PostProcessing,
    Questions,
    Results,
    RowMasks,
    Support,
    Tokens,
    allocate,
    amend,
    begin,
    search,
    unpack_results,
)
from lexshard.kernels.search.gpu.triton_adjust import REALS
from lexshard.kernels.search.gpu.triton_bounds import IDLE, INTEGERS

DeviceScreen = Callable[[torch.Tensor], Screened]
# Besides searching: nothing, adjusting the estimates of some tokens, leaving those of masks, too.
Work = Literal["plain", "adjusted", "masked"]
WORK: tuple[Work, ...] = get_args(Work)

__all__ = ["DeviceStep", "PackedStep", "StepResults", "pack_step"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedStep:
    """What N rows ask, as the bytes that travel to the device."""

    integers: npt.NDArray[np.int64]  # [N, 5]
    reals: npt.NDArray[np.float64]  # [N, 9]
    support: PackedSupport
    masks: npt.NDArray[np.uint64]  # [M, blocks]
    mask: npt.NDArray[np.int64]  # [N], places among them or -1


def pack_step(
    needs: Needs,
    controls: Controls,
    adjustments: Adjustments,
    seen: Sequence[npt.NDArray[np.int32]],
    vocabulary_size: int,
    *,
    grows: bool = False,
) -> PackedStep:
    """Rows that search for ``needs`` and draw by ``controls``; ``seen`` are the ids that they have
    seen, where it ``grows`` all but one, which the device knows."""
    support = pack_support(adjustments, seen, vocabulary_size, grows=grows)
    integers, reals = pack_questions(needs, controls)
    if grows:
        penalised = adjustments.table >= 0
        penalties = adjustments.frequency, adjustments.presence, adjustments.repetition
        reals[penalised, 6:] = np.stack(penalties, axis=1)[penalised]
    reals[:, 2], reals[:, 3] = support.slope, support.size
    return PackedStep(integers, reals, support, adjustments.masks, adjustments.mask)


@dataclass(frozen=True, slots=True, eq=False)
class StepResults:
    """What a launched step will have written to the host's memory."""

    memory: torch.Tensor
    thresholds: torch.Tensor  # [N] float64, on the device
    drawn: torch.Tensor  # [N] int32, likewise
    rows: int  # of the buffers
    wait: Callable[[], None]

    @classmethod
    def of(cls, there: torch.Tensor, thresholds: torch.Tensor, rows: int) -> StepResults:
        """What now lies in ``there``, the memory of a search's results of ``rows`` rows, or will
        when the device comes to it."""
        memory = torch.empty(there.shape, dtype=torch.int32, pin_memory=there.is_cuda)
        memory.copy_(there, non_blocking=True)
        drawn = unpack_results(there, rows).drawn
        if not there.is_cuda:
            return cls(memory, thresholds, drawn, rows, lambda: None)
        event = torch.cuda.Event()
        event.record()
        return cls(memory, thresholds, drawn, rows, event.synchronize)

    def read(self) -> tuple[npt.NDArray[Any], ...]:
        """Waits; ``largest``, ``finite``, ``counts``, ``drawn``, ``candidates`` and ``logits``."""
        self.wait()
        return tuple(part.numpy() for part in unpack_results(self.memory, self.rows))


class DeviceStep:
    """Buffers for up to ``rows`` hidden states, screened with one tier (``screen``).

    ``weight`` [V, d] lies on the device; ``entries`` [S, 6] int32 is room for the adjusted tokens
    of a step, ``masks`` [M, blocks] int64 for its masks, both shared by all steps; ``tokens`` says
    which of the vocabulary the rows of ``weight`` are; ``pool`` is the memory of the CUDA graphs,
    shared likewise. What a launch leaves in ``hidden``, ``questions`` and ``results`` holds until
    the next.
    """

    def __init__(
        self,
        rows: int,
        weight: torch.Tensor,
        screen: DeviceScreen,
        post: PostProcessing,
        entries: torch.Tensor,
        masks: torch.Tensor,
        tokens: Tokens,
        *,
        capacity: int,
        leaders: int,
        pool: Any,
    ) -> None:
        size, columns = weight.shape
        device = weight.device
        self.rows = rows
        self._weight = weight
        self._screen = screen
        self._post = post
        self._pool = pool
        # With the launches that adjust and mask estimates or without, and which of them ran last.
        self._graphs: dict[Work, torch.cuda.CUDAGraph] = {}
        self._work: Work = "plain"
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.hidden = torch.zeros(rows, columns, device=device)
        # One piece of memory, so that one copy fills it.
        self._lengths = [INTEGERS * rows, REALS * rows, rows + 1, rows]
        self._words = torch.zeros(sum(self._lengths), dtype=torch.int64, device=device)
        integers, reals, offsets, places = self._words.split(self._lengths)
        reals = reals.view(torch.float64).view(rows, REALS)
        self.questions = Questions(integers.view(rows, INTEGERS), reals)
        self._support = Support(offsets, entries)
        self._before = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._masks = RowMasks(masks, places, masks.shape[1])
        self._workspace = allocate(
            rows, size, capacity=capacity, leaders=leaders, device=device, tokens=tokens
        )

    @property
    def results(self) -> Results:
        """What the search has found, on the device."""
        return self._workspace.results

    def launch(
        self, hidden: torch.Tensor, packed: PackedStep, before: torch.Tensor | None = None
    ) -> StepResults:
        """Starts the step of ``hidden`` [N, d] fp32, N up to ``rows``, wherever it lies; ``before``
        [N] int32 is one more token there that each row has seen, where ``packed`` grows."""
        count = len(hidden)
        words = torch.zeros(sum(self._lengths), dtype=torch.int64)
        integers, reals, offsets, places = (each.numpy() for each in words.split(self._lengths))
        integers[::INTEGERS] = IDLE
        integers[: INTEGERS * count] = packed.integers.ravel()
        reals[: REALS * count] = packed.reals.ravel().view(np.int64)
        offsets[:] = packed.support.offsets[-1]
        offsets[:count] = packed.support.offsets[:-1]
        places[:] = -1
        places[:count] = packed.mask
        send(self.hidden[:count], hidden)
        send(self._words, words)
        entries = packed.support.entries
        if len(entries):
            if before is None:
                self._before.fill_(-1)
            else:
                self._before[:count].copy_(before)
            send(self._support.entries[: len(entries)], torch.from_numpy(entries))
        masks = packed.masks
        if len(masks):
            send(self._masks.words[: len(masks)], torch.from_numpy(masks.view(np.int64)))
        if self._weight.is_cuda and not self._graphs:
            self._capture()
        self._work = "masked" if len(masks) else "adjusted" if len(entries) else "plain"
        self.replay()
        return self._results()

    def replay(self) -> None:
        """Runs the search on what the buffers hold."""
        if self._graphs:
            self._graphs[self._work].replay()
        else:
            self._compute(self._work)

    def _compute(self, work: Work) -> None:
        if self._beside is None:
            self._begin()
            screened = self._screen(self.hidden)
        else:
            # A branch of the graph: noise is drawn while the screen waits for memory.
            current = torch.cuda.current_stream()
            self._beside.wait_stream(current)
            with torch.cuda.stream(self._beside):
                self._begin()
            screened = self._screen(self.hidden)
            current.wait_stream(self._beside)
        if work != "plain":
            amend(self._support, self._before, self.questions)
        search(
            self.hidden,
            self._weight,
            screened,
            self._post,
            self.questions,
            self._support,
            self._workspace,
            adjusts=work != "plain",
            masks=self._masks if work == "masked" else None,
        )

    def _begin(self) -> None:
        begin(self.hidden, self.questions, self._workspace)

    def _capture(self) -> None:
        """The first launch compiles, which a capture must not see."""
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            self._compute("masked")
        current.wait_stream(aside)
        for work in WORK:
            graph = torch.cuda.CUDAGraph()
            # The body may be using the device from another thread.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._compute(work)
            self._graphs[work] = graph

    def _results(self) -> StepResults:
        workspace = self._workspace
        return StepResults.of(workspace.memory, workspace.buffers.thresholds, self.rows)


def send(target: torch.Tensor, values: torch.Tensor) -> None:
    """``target`` becomes ``values``, in the order of the current stream: nothing waits."""
    if target.is_cuda and not values.is_cuda:
        # The allocator of pinned memory keeps it until the copy is done.
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
