"""What head benchmarks measure on: heads with hidden states, and what each row asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.states.need import Need
from lexshard.actors.states.row_table import RowTable
from lexshard.kernels.draw import draw
from lexshard.kernels.rows import canonical_logits, postprocess
from lexshard.loadtest.bench.synthetic.heads import synthetic_head, synthetic_hidden

STATES = 96  # hidden states of a synthetic head; twice as many for calibration and measurement
# Ways to choose tokens, as a row asks a head for them: all but greedy at temperature 1.
SAMPLING_METHODS = {
    "greedy": Need("top1"),
    "gumbel": Need("top1", inverse_temperature=1.0),
    "top50": Need("topk", k=50, inverse_temperature=1.0),
    "minp": Need("minp", min_p=0.05, inverse_temperature=1.0),
}


def needs(method: Need, batch: int, step: int) -> list[Need]:
    """What ``batch`` rows of different keys ask in a step."""
    return [replace(method, key=key, position=step) for key in range(batch)]


def draw_from_all(logits: npt.NDArray[np.float32], asked: Sequence[Need]) -> npt.NDArray[np.int64]:
    """The tokens [B] that rows draw from the logits [B, V] of every token."""
    rows, size = logits.shape
    ids = np.tile(np.arange(size, dtype=np.int32), rows)
    offsets = np.arange(rows + 1, dtype=np.int64) * size
    return draw(ids, logits.reshape(-1), offsets, RowTable.of(asked).controls)


@dataclass(frozen=True, slots=True, eq=False)
class HeadWorkload:
    """A head and two disjoint sets of hidden states: one to choose tiers by, one to measure."""

    name: str
    weight: torch.Tensor  # [V, d] fp32 or bf16
    bias: torch.Tensor | None  # [V] fp32
    scale: float
    softcap: float | None
    calibration: npt.NDArray[np.float32]  # [M, d]
    hidden: npt.NDArray[np.float32]  # [M, d]

    def logits(self, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The canonical logits [N, V] of hidden states [N, d]."""
        bias = None if self.bias is None else self.bias.numpy()
        raw = canonical_logits(hidden, self.weight)
        return postprocess(raw, bias=bias, scale=self.scale, softcap=self.softcap)

    def states(self, step: int, batch: int) -> npt.NDArray[np.float32]:
        """The hidden states [batch, d] of a step; later steps take the following ones."""
        places = (np.arange(batch) + step * batch) % len(self.hidden)
        return np.ascontiguousarray(self.hidden[places])


def synthetic_workload(
    vocabulary: int, columns: int, dtype: torch.dtype, seed: int
) -> HeadWorkload:
    """A head of `synthetic.heads`."""
    weight = synthetic_head(vocabulary, columns, dtype=dtype, seed=seed)
    hidden = synthetic_hidden(weight, 2 * STATES, seed=seed + 1).numpy()
    return HeadWorkload(
        name="synthetic",
        weight=weight,
        bias=None,
        scale=1.0,
        softcap=None,
        calibration=hidden[:STATES],
        hidden=hidden[STATES:],
    )


def model_workload(folder: Path, seed: int) -> HeadWorkload:
    """The head of a checkpoint with hidden states of its own body on the calibration passages.

    Raises ModelRefusedError where the model cannot be loaded.
    """
    from lexshard.actors.body.loading import load  # transformers takes seconds
    from lexshard.actors.index.hidden import calibration_prompts, hidden_states, load_tokenizer

    model = load(folder, device="cpu")
    prompts = calibration_prompts(
        load_tokenizer(folder), model.vocabulary_size, model.max_positions, seed
    )
    states = hidden_states(model.body, prompts.token_ids)
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(states))
    half = len(states) // 2
    head, rows = model.head, model.vocabulary_size
    return HeadWorkload(
        name=str(folder),
        weight=head.weight[:rows],
        bias=None if head.bias is None else head.bias[:rows],
        scale=head.scale,
        softcap=head.softcap,
        calibration=states[order[:half]],
        hidden=states[order[half:]],
    )
