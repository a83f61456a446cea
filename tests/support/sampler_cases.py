"""Sequences, heads and steps that samplers are tested with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.proposal import GuessTest
from lexshard.actors.states.row_table import flatten_adjustments
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.kernels.draw import Controls
from lexshard.kernels.draw import reference as draw_reference
from lexshard.kernels.penalties import reference as penalties_reference
from lexshard.kernels.rows import as_array, postprocess
from lexshard.kernels.rows import reference as rows_reference
from lexshard.kernels.verify import DenseProposals, DraftedRows
from lexshard.kernels.verify import reference as verify_reference
from tests.support.cluster_cases import weights
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
        raw = self.logits(hidden)
        return reference_token(state, np.arange(len(raw), dtype=np.int32), raw)


def reference_token(
    state: SequenceState, ids: np.ndarray, raw: np.ndarray, *, truncated: bool = False
) -> int:
    """The plain decision: adjust, truncate (top-p where it is not ``truncated``), add noise, take
    the best."""
    p, offsets = state.parameters, np.array([0, len(ids)])
    logits = penalties_reference.adjust(
        ids, raw, offsets, flatten_adjustments([state.adjustment()])
    )
    controls = Controls(
        np.array([0.0 if p.temperature == 0 else float(np.float32(1 / p.temperature))]),
        np.array([p.top_k]),
        np.array([1.0 if truncated else p.top_p]),
        np.array([math.log(p.min_p) if p.min_p else -math.inf]),
        np.array([state.key], np.uint64),
        np.array([state.position], np.uint64),
    )
    return int(draw_reference.draw(ids, logits, offsets, controls)[0])


def verified_token(
    guess: GuessTest, logits: np.ndarray, inverse_temperature: float, key: int, position: int
) -> int:
    """What a row of all adjusted and truncated ``logits`` emits that tests ``guess``, plainly."""
    proposals, proposal = None, guess.proposal
    if proposal is not None:
        proposed = np.full((1, len(logits)), -np.inf, np.float32)
        proposed[0, proposal.ids] = proposal.logits
        proposals = DenseProposals(proposed, np.array([proposal.inverse_temperature]))
    rows = DraftedRows(
        np.array([guess.token_id]),
        np.array([inverse_temperature]),
        np.array([key], np.uint64),
        np.array([position], np.uint64),
    )
    return int(verify_reference.verify(logits[None], rows, proposals, None).tokens[0])


@dataclass(frozen=True)
class HeadCase:
    """Output weights of some kind, and a step of so many ``rows``."""

    seed: int
    rows: int
    size: int
    columns: int
    flavour: str
    post: tuple[bool, float | None, float]  # biases, softcap, scale
    bfloat16: bool


HEAD_CASES = st.builds(
    HeadCase,
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 5),
    size=st.integers(5, 300),
    columns=st.integers(1, 40),
    flavour=st.sampled_from(["random", "duplicates", "zero", "huge", "coarse", "clustered"]),
    post=st.sampled_from([(False, None, 1.0), (True, None, 0.25), (True, 30.0, 2.0)]),
    bfloat16=st.booleans(),
)


def check_that_tokens_are_the_dense_heads(case: HeadCase, head_of: Callable[..., Any]) -> None:
    """Of three steps, whatever is asked; rows that pad the weights are no tokens."""
    random = np.random.default_rng(case.seed)
    size, columns, (biased, softcap, scale) = case.size, case.columns, case.post
    weight = weights(int(random.integers(2**32)), case.flavour, size, columns)
    weight = weight.bfloat16() if case.bfloat16 else weight
    bias = torch.from_numpy(random.standard_normal(size).astype(np.float32)) if biased else None
    padding = torch.full((int(random.integers(0, 9)), columns), 1e9, dtype=weight.dtype)
    padded_bias = None if bias is None else torch.cat([bias, torch.full((len(padding),), 1e9)])
    head = head_of(torch.cat([weight, padding]), padded_bias, softcap, scale, size)
    dense = DenseHead(weight, bias, softcap, scale)
    prompts = [
        tuple(random.integers(0, size, random.integers(1, 30)).tolist()) for _ in range(case.rows)
    ]
    states = [state_of(parameters_of(random, size), size, prompt) for prompt in prompts]
    for _ in range(3):
        hidden = torch.from_numpy(random.standard_normal((case.rows, columns)).astype(np.float32))
        expected = [dense.token(h, state) for h, state in zip(hidden, states, strict=True)]
        decisions = decide_step(head, hidden, states)
        assert [-1 if d is None else d.token_id for d in decisions] == expected
        for state, token in zip(states, expected, strict=True):
            state.append(max(token, 0))


def decide_step(
    head: Any, hidden: torch.Tensor, states: list[SequenceState]
) -> list[RowDecision | None]:
    return screen_and_decide(head, hidden, states)[0]


def state_of(
    parameters: SamplingParameters, size: int, prompt: tuple[int, ...] = (1, 2), choice: int = 0
) -> SequenceState:
    return SequenceState(Request("r", choice, prompt, parameters), size, EOS)
