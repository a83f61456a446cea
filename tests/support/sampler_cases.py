"""Sequences, heads and steps that samplers are tested with."""

from __future__ import annotations

import math

import numpy as np
import torch

from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.draw import Controls
from lexshard.kernels.draw import reference as draw_reference
from lexshard.kernels.penalties import reference as penalties_reference
from lexshard.kernels.rows import as_array, postprocess
from lexshard.kernels.rows import reference as rows_reference
from tests.support.decisions import screen_and_decide

EOS = (0, 3)


def parameters_of(random: np.random.Generator, size: int) -> SamplingParameters:
    def maybe(share: float, value: object, otherwise: object) -> object:
        return value if random.random() < share else otherwise

    def ids(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, size, count).tolist())

    return SamplingParameters(
        temperature=float(random.choice([0.0, 0.1, 0.8, 1.0, 3.0])),
        top_k=int(maybe(0.4, random.integers(1, 60), 0)),
        top_p=float(maybe(0.4, random.uniform(0.01, 1.0), 1.0)),
        min_p=float(maybe(0.3, random.uniform(0.001, 1.0), 0.0)),
        repetition_penalty=float(maybe(0.4, random.choice([0.8, 1.2, 2.0]), 1.0)),
        presence_penalty=float(maybe(0.3, random.choice([-1.0, 0.5]), 0.0)),
        frequency_penalty=float(maybe(0.3, random.choice([-0.5, 0.7]), 0.0)),
        logit_bias=tuple(
            (i, float(random.choice([-100, -1, 2]))) for i in set(maybe(0.3, ids(3), ()))
        ),
        bad_words=maybe(0.3, (ids(1), ids(2), ids(1)), ()),
        allowed_ids=maybe(0.2, (*ids(20), 1), None),
        min_tokens=int(maybe(0.3, 4, 0)),
        stop_token_ids=maybe(0.3, ids(2), ()),
        seed=int(random.integers(0, 2**64, dtype=np.uint64)),
        logprobs=maybe(0.2, int(random.integers(0, 5)), None),
    )


def weight_of(random: np.random.Generator, size: int, columns: int, flavour: str) -> torch.Tensor:
    weight = random.standard_normal((size, columns)).astype(np.float32)
    if flavour == "duplicates":
        weight = weight[random.integers(0, max(size // 4, 1), size)]
    elif flavour == "zero":
        weight[random.random(size) < 0.7] = 0
    elif flavour == "huge":
        weight *= np.float32(1e18)
    elif flavour == "overflow":
        weight *= np.float32(1e37)
    elif flavour == "coarse":
        weight = weight.round(0)
    return torch.from_numpy(weight)


class DenseHead:
    """The same decisions by brute force: every canonical logit, every noise, sorts."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, scale: float
    ) -> None:
        self.weight, self.bias, self.softcap, self.scale = weight, bias, softcap, scale

    def logits(self, hidden: torch.Tensor) -> np.ndarray:
        raw = rows_reference.canonical_logits(hidden[None].numpy(), as_array(self.weight))[0]
        bias = None if self.bias is None else self.bias.numpy()
        return postprocess(raw, bias=bias, scale=self.scale, softcap=self.softcap)

    def token(self, hidden: torch.Tensor, state: SequenceState) -> int:
        raw, p = self.logits(hidden), state.parameters
        ids, offsets = np.arange(len(raw), dtype=np.int32), np.array([0, len(raw)])
        adjustments = flatten_adjustments([state.adjustment()])
        logits = penalties_reference.adjust(ids, raw, offsets, adjustments)
        inverse = 0.0 if p.temperature == 0 else float(np.float32(1 / p.temperature))
        controls = Controls(
            np.array([inverse]),
            np.array([p.top_k]),
            np.array([p.top_p]),
            np.array([math.log(p.min_p) if p.min_p else -math.inf]),
            np.array([state.key], np.uint64),
            np.array([state.position], np.uint64),
        )
        return int(draw_reference.draw(ids, logits, offsets, controls)[0])


def decide_step(
    shard: Shard, hidden: torch.Tensor, states: list[SequenceState]
) -> list[RowDecision | None]:
    return screen_and_decide(shard, hidden, states)[0]


def state_of(
    parameters: SamplingParameters, size: int, prompt: tuple[int, ...] = (1, 2), choice: int = 0
) -> SequenceState:
    return SequenceState(Request("r", choice, prompt, parameters), size, EOS)
