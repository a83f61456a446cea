"""What the head benchmark measures on: heads with hidden states, and what each row asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lexshard.actors.states.need import Need
from lexshard.kernels.draw import Controls
from lexshard.loadtest.bench.synthetic.heads import synthetic_head, synthetic_hidden

TOP_K = 50
MIN_P = 0.05
STATES = 96  # hidden states of a synthetic head; twice as many for calibration and measurement


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """A way to choose tokens: all but greedy at temperature 1."""

    name: str
    need: Callable[[int, int], Need]  # of a key and a position
    greedy: bool = False
    top_k: int = 0
    min_p: float = 0.0


def _gumbel(key: int, position: int) -> Need:
    return Need("top1", key=key, position=position, inverse_temperature=1.0)


def _top_k(key: int, position: int) -> Need:
    return Need("topk", k=TOP_K, key=key, position=position, inverse_temperature=1.0)


def _min_p(key: int, position: int) -> Need:
    return Need("minp", min_p=MIN_P, key=key, position=position, inverse_temperature=1.0)


SAMPLING_METHODS = {
    method.name: method
    for method in (
        SamplingMethod("greedy", lambda key, position: Need("top1"), greedy=True),
        SamplingMethod("gumbel", _gumbel),
        SamplingMethod("top50", _top_k, top_k=TOP_K),
        SamplingMethod("minp", _min_p, min_p=MIN_P),
    )
}


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

    def states(self, step: int, batch: int) -> npt.NDArray[np.float32]:
        """The hidden states [batch, d] of a step; later steps take the following ones."""
        places = (np.arange(batch) + step * batch) % len(self.hidden)
        return np.ascontiguousarray(self.hidden[places])


def needs(method: SamplingMethod, batch: int, step: int) -> list[Need]:
    return [method.need(key, step) for key in range(batch)]


def controls(method: SamplingMethod, batch: int, step: int) -> Controls:
    """The same as `needs`, for the draw."""
    return Controls(
        inverse_temperature=np.full(batch, 0.0 if method.greedy else 1.0),
        top_k=np.full(batch, method.top_k, np.int64),
        top_p=np.ones(batch),
        log_min_p=np.full(batch, np.log(method.min_p) if method.min_p else -np.inf),
        key=np.arange(batch, dtype=np.uint64),
        position=np.full(batch, step, np.uint64),
    )


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
