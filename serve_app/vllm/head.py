"""The certified head of a model that vLLM has loaded, or why there is none."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.sampler import Sampler, token_logprobs
from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.states.mask import Mask, Masks
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels import pool
from lexshard.kernels.linear import PackedWeight, fits_bfloat16, linear, pack
from lexshard.kernels.quantize import quantize

TIER = "int8"
COMPARED_ROWS = 16
CAPACITY = 16  # penalised sequences that there is room for at first


def head_refusal(processor: Any, lm_head: Any, bias: torch.Tensor | None) -> str | None:
    """Why the logits of vLLM's ``processor`` and ``lm_head`` cannot be certified; None if they
    can."""
    weight = getattr(lm_head, "weight", None)
    method = type(getattr(lm_head, "quant_method", None)).__name__
    if processor.logits_as_input:
        return "the model computes its logits itself"
    if lm_head.tp_size > 1:
        return "the output head is cut across tensor-parallel ranks"
    if method not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
        return f"the output head is quantised ({method})"
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16):
        return f"output weights of type {getattr(weight, 'dtype', None)}"
    if processor.soft_cap is not None and processor.scale != 1.0:
        return "logits with both a soft cap and a scale"
    if processor.scale <= 0:
        return f"a logit scale of {processor.scale}"
    if weight.shape[0] < processor.org_vocab_size:
        return "the output head has fewer rows than the vocabulary"
    if bias is not None and len(bias) < processor.org_vocab_size:
        return "the output bias has fewer entries than the vocabulary"
    return None


class CertifiedHead:
    """Candidates and draws from the rows of ``weight`` [V or more, d], fp32 or bf16, as vLLM keeps
    them, and the ``states`` of the sequences that they are drawn for.

    Raises ValueError where the weights or ``bias`` [V or more] are not finite.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        softcap: float | None,
        scale: float,
        vocabulary_size: int,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.states = SequenceStates(vocabulary_size, (), CAPACITY)
        self.masks = Masks(vocabulary_size)
        self._weight = weight
        places = torch.linspace(0, vocabulary_size - 1, COMPARED_ROWS, device=weight.device)
        self._places = places.long()
        self._compared = weight[self._places].clone()
        own = weight.detach()[:vocabulary_size]
        own = own.bfloat16() if fits_bfloat16(own) else own
        settings = own, bias, softcap, scale, vocabulary_size
        shard = _on_device(*settings) if weight.is_cuda else _on_cpu(*settings)
        self._head = SequenceHead(shard, self.states)
        threads = torch.get_num_threads()
        pool.set_threads(threads)
        sampler = Sampler(SamplerSettings(vocabulary_size, (), threads), self.states)
        self._decisions = OwnDecisions(sampler, self.states)
        self._warm_up(weight.shape[1])

    def is_current(self) -> bool:
        """Whether the weights are those of before, by some of their rows: training changes all."""
        return torch.equal(self._weight[self._places], self._compared)

    def decide(self, hidden: torch.Tensor, names: RowNames) -> list[RowDecision | None]:
        """A decision per row of ``hidden`` [N, d], whose rows are ``names``; None where no token is
        left. Log-probabilities are those after the mask of the row, as vLLM gives them. Raises
        `NonFiniteHiddenError`."""
        pool.begin_step(len(hidden))
        states = hidden.detach().float()
        found = self._head.candidates(states.contiguous(), names)
        decided = self._decisions.submit(0, names, found).result()
        for row, mask in enumerate(names.masks):
            decision = decided[row]
            if mask is not None and decision is not None and decision.logprobs is not None:
                decided[row] = self._scored_within(mask, decision, found, row)
        return decided

    def _scored_within(
        self, mask: Mask, decision: RowDecision, found: Candidates, row: int
    ) -> RowDecision:
        assert decision.logprobs is not None
        raw = np.full((1, self.vocabulary_size), -np.inf, np.float32)
        raw[0, mask.ids] = found.raw[found.offsets[row] : found.offsets[row + 1]][mask.ids]
        count = len(decision.logprobs.top)
        [scored] = token_logprobs(raw, np.array([decision.token_id]), [count])
        return RowDecision(decision.token_id, scored)

    def _warm_up(self, columns: int) -> None:
        """Drives what most steps need, so that no request waits for a compiler."""
        kinds = (
            SamplingParameters(temperature=0.0),
            SamplingParameters(temperature=0.8),
            SamplingParameters(temperature=0.8, top_k=5, top_p=0.9, repetition_penalty=1.1),
            SamplingParameters(temperature=0.8, min_p=0.1),
            SamplingParameters(temperature=0.8, top_p=0.9),
            SamplingParameters(temperature=0.0, logprobs=1),
        )
        hidden = self._weight[: len(kinds)].detach().float()  # as good as any, and not all alike
        for sequence, parameters in enumerate(kinds):
            self.states.open(sequence, Request("", 0, (0,), parameters))
        for names in (*(RowNames((each,)) for each in range(len(kinds))), RowNames((0, 1, 2, 3))):
            self.decide(hidden[list(names.sequences)], names)
        for sequence in range(len(kinds)):
            self.states.close(sequence)


class _WhenNeeded:
    """The product of hidden states with all of ``weight``, from a copy that is made when a screen
    needs it: most heads never do."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @cached_property
    def _packed(self) -> PackedWeight:
        return pack(self._weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, weight=self._packed)


def _on_cpu(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    scale: float,
    vocabulary_size: int,
) -> OutputHead:
    tiers = Ladder({TIER: quantize(weight, TIER)}, ((1, TIER),))
    dense = _WhenNeeded(weight)
    return Shard(weight, bias, softcap, scale, vocabulary_size, linear=dense, ladder=tiers)


def _on_device(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    scale: float,
    vocabulary_size: int,
) -> OutputHead:
    from lexshard.actors.head.gpu.device_shard import DeviceShard  # needs Triton

    tiers = Ladder({TIER: quantize(weight.cpu(), TIER)}, ((1, TIER),))
    device = str(weight.device)
    return DeviceShard(weight, bias, softcap, scale, vocabulary_size, tiers, device=device)
