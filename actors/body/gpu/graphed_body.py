"""The general body on a GPU: steps of a few fixed shapes, each one CUDA graph.

An 8B model launches some 1,500 kernels a step, which a host takes longer to launch than a GPU to
run. A graph is launched once. Its shapes are fixed, so a step is padded to the next bucket of rows
and, unless attention is planned, of blocks per sequence; padding goes to a block of the cache that
no sequence has. A step is one copy, one launch and one copy of its result; nothing waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.capture import Capture, compute_each_time
from lexshard.actors.body.gpu.flash_attention import PlannedSteps
from lexshard.actors.body.gpu.step_inputs import StaticInputs

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LARGEST_GRAPH = ROWS[-1]
FIXED_ROWS = 64  # of every step of a batch-invariant body
SEQUENCES = (8, 64)  # or as many as rows
SMALLEST_WIDTH = 64  # blocks of a sequence

Shape = tuple[int, int, int]  # rows, sequences, blocks of each
logger = logging.getLogger("lexshard.body")


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """A step of one shape: its inputs, its result, and what computes one from the other."""

    inputs: StaticInputs
    planned: PlannedSteps | None  # what must know of a step before it attends
    hidden: torch.Tensor  # [rows, d] float32
    replay: Callable[[], object]


class GraphedBody:
    """``body`` in graphs; see ``actors.body.batch.Body`` for the contract. ``new_capture`` says how
    the graphs of one cache are made.

    Graphs are made when a shape is first wanted. A model that cannot be recorded (it waits for the
    device somewhere) is computed without: ``refusal`` says why, until another cache is tried. A
    shape alone that cannot be (there is no memory left for it) leaves the others their graphs. Both
    are logged. Steps of more rows than
    the largest bucket are computed without, too. With ``fixed_rows`` every step is computed in
    pieces of exactly so many rows: no library can choose another order of additions for another
    number of rows.
    """

    def __init__(
        self,
        body: GeneralBody,
        new_capture: Callable[[], Capture],
        *,
        fixed_rows: int | None = None,
    ) -> None:
        self._body = body
        self._new_capture = new_capture
        self._capture = new_capture()
        self._rows = ROWS if fixed_rows is None else (fixed_rows,)
        self._fixed_rows = fixed_rows
        self._graphs: dict[Shape, StepGraph] = {}
        self._unrecorded: set[Shape] = set()
        self._scratch_block = 0
        self.refusal = ""
        self.batch_invariant = False
        self.name = body.name
        self.device = body.device
        self.hidden_size = body.hidden_size
        self.vocabulary_size = body.vocabulary_size
        self.num_layers = body.num_layers
        self.kv_heads = body.kv_heads
        self.head_dim = body.head_dim
        self.max_positions = body.max_positions

    @property
    def description(self) -> str:
        """What is in graphs and what is compiled, in words."""
        graphs = f"steps of up to {self._rows[-1]} rows in CUDA graphs"
        if self.refusal:
            graphs = f"without CUDA graphs ({self.refusal})"
        elif self._fixed_rows is not None:
            graphs = f"every step in CUDA graphs of {self._fixed_rows} rows"
        return f"{graphs}, {self._body.layers}; {self._body.attention}"

    def memory(self) -> tuple[int, int]:
        """Bytes of the GPU: those that are free, and all. Waits for it."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)

    def kv_bytes_per_block(self) -> int:
        return self._body.kv_bytes_per_block()

    def allocate_cache(self, num_blocks: int) -> None:
        """Reserve ``num_blocks`` blocks and one more, for padding. Graphs of another cache go."""
        self._graphs.clear()
        self._unrecorded.clear()
        self.refusal = ""
        self._capture = self._new_capture()
        self._body.allocate_cache(num_blocks + 1)
        self._scratch_block = num_blocks

    def record(self, sequences: int, blocks: int) -> None:
        """Makes every graph of steps in which up to so many sequences, of up to so many blocks
        each, compute one token: no client waits for one then."""
        fewest = 1
        for rows in self._rows:
            counts = range(fewest, min(rows, sequences) + 1)
            for count in sorted({_sequences(count, rows) for count in counts}):
                width = SMALLEST_WIDTH
                while width <= self._width(blocks):
                    self._graph((rows, count, width))
                    width *= 2
            fewest = rows + 1

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `GeneralBody.forward`."""
        if self._fixed_rows is None:
            return self._forward(batch)
        return torch.cat([self._forward(piece) for piece in _pieces(batch, self._fixed_rows)])

    def _forward(self, batch: Batch) -> torch.Tensor:
        rows = next((rows for rows in self._rows if rows >= len(batch.token_ids)), None)
        graph = None
        if rows is not None:
            sequences, width = batch.block_tables.shape
            graph = self._graph((rows, _sequences(sequences, rows), self._width(width)))
        if graph is None:
            return self._body.forward(batch)
        graph.inputs.fill(batch, self._scratch_block)
        if graph.planned is not None:
            graph.planned.plan(batch, self._scratch_block)
        graph.replay()
        # The next replay writes to the same memory.
        return graph.hidden[: len(batch.output_rows)].clone()

    def _graph(self, shape: Shape) -> StepGraph | None:
        """None where a step of this shape is computed as it comes."""
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph
        recorded = not self.refusal and shape not in self._unrecorded
        if not recorded and self._fixed_rows is None:
            return None
        try:
            # Of a fixed shape all the same, where that is asked for.
            graph = self._made(shape, self._capture if recorded else compute_each_time)
        except RuntimeError as error:
            if not recorded:  # not the recording fails, but the computation
                raise
            self._refuse(shape, error)
            return self._graph(shape)
        self._graphs[shape] = graph
        return graph

    def _made(self, shape: Shape, capture: Capture) -> StepGraph:
        rows, sequences, width = shape
        inputs = StaticInputs(rows, rows, sequences + 1, width, self.device)
        inputs.fill(_nothing(width), self._scratch_block)
        planned = None
        if self._body.flash is not None:
            planned = self._body.flash.of_shape(rows, sequences)
            planned.plan(_nothing(width), self._scratch_block)
        hidden, replay = capture(lambda: self._body.compute(inputs.tensors, planned))
        return StepGraph(inputs, planned, hidden, replay)

    def _width(self, blocks: int) -> int:
        """The bucket of block tables: a power of two, or the only one where nothing reads them."""
        planned = self._body.flash is not None
        return SMALLEST_WIDTH if planned else max(SMALLEST_WIDTH, 1 << (blocks - 1).bit_length())

    def _refuse(self, shape: Shape, error: RuntimeError) -> None:
        """Goes on without a graph: of this shape where others have been recorded or memory has run
        out, else of any."""
        told = (str(error).splitlines() or ["its steps cannot be recorded"])[0]
        if self._graphs or isinstance(error, torch.OutOfMemoryError):
            self._unrecorded.add(shape)
            which = "steps of {} rows, {} sequences, {} blocks".format(*shape)
        else:
            self.refusal = told
            which = "all steps, until another cache is allocated"
        logger.warning("%s: no CUDA graph (%s)", which, told)


def _sequences(count: int, rows: int) -> int:
    """The bucket of sequences: few of them where rows are those of prompts."""
    return next((each for each in SEQUENCES if count <= each <= rows), rows)


def _nothing(width: int) -> Batch:
    """No rows: a step that is padding alone."""
    none = np.zeros(0, np.int32)
    return Batch(none, none, none.astype(np.int64), none, np.zeros((0, width), np.int32), none)


def _pieces(batch: Batch, rows: int) -> Iterator[Batch]:
    """``batch`` in pieces of at most ``rows`` rows, one after the other."""
    for start in range(0, len(batch.token_ids), rows):
        own = slice(start, start + rows)
        owners, wanted = batch.row_sequence[own], batch.output_rows
        inside = (wanted >= start) & (wanted < start + rows)
        yield replace(
            batch,
            token_ids=batch.token_ids[own],
            positions=batch.positions[own],
            slots=batch.slots[own],
            row_sequence=owners - owners[0],
            # A sequence's rows are side by side, so those of a piece have as many at most.
            block_tables=batch.block_tables[owners[0] : owners[-1] + 1],
            output_rows=wanted[inside] - start,
            drawn=None if batch.drawn is None else batch.drawn[own],
        )
