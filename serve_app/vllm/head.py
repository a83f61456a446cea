"""The certified head of a model that vLLM has loaded, or why there is none."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.sampler import Sampler, token_logprobs
from lexshard.actors.decision.warm_up import KINDS
from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.sequence_head import SequenceHead
from lexshard.actors.head.shard import Shard
from lexshard.actors.messages import Request, RowDecision, SamplingParameters
from lexshard.actors.states.mask import Masks
from lexshard.actors.states.row_table import RowNames
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.kernels import pool
from lexshard.kernels.linear import fits_bfloat16, linear, pack
from lexshard.kernels.quantize import quantize

COMPARED_ROWS = 16
CAPACITY = 16  # penalised sequences that there is room for at first
UNQUANTISED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
# What most steps need: these together, alone what is not top-k.
WARM_UP = (
    *KINDS,
    SamplingParameters(temperature=0.0),
    *(SamplingParameters(temperature=0.8, min_p=p, top_p=1.0 - p) for p in (0.0, 0.1)),
)


def head_refusal(processor: Any, lm_head: Any, bias: torch.Tensor | None) -> str | None:
    """Why the logits that vLLM's ``processor`` makes with ``lm_head`` cannot be certified; None if
    they can."""
    weight, rows = getattr(lm_head, "weight", None), processor.org_vocab_size
    method = type(getattr(lm_head, "quant_method", None)).__name__
    refusals = {
        "a model that computes its logits itself": processor.logits_as_input,
        "an output head that is cut across tensor-parallel ranks": lm_head.tp_size > 1,
        f"an output head with {method}": method not in UNQUANTISED,
        "both a soft cap and a scale": processor.soft_cap is not None and processor.scale != 1.0,
        f"a logit scale of {processor.scale}": processor.scale <= 0,
        "output weights of another type than float32 and bfloat16": weight is None
        or weight.dtype not in (torch.float32, torch.bfloat16),
        "fewer output rows than tokens": weight is not None
        and min(len(weight), rows if bias is None else len(bias)) < rows,
    }
    return next((reason for reason, holds in refusals.items() if holds), None)


class PluginHead:
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
        spread = torch.linspace(0, vocabulary_size - 1, COMPARED_ROWS, device=weight.device)
        self._places = spread.long()
        self._compared = weight[self._places].clone()
        own = weight.detach()[:vocabulary_size]
        own = own.bfloat16() if fits_bfloat16(own) else own
        self._head = SequenceHead(_shard(own, bias, softcap, scale, vocabulary_size), self.states)
        threads = torch.get_num_threads()
        pool.set_threads(threads)
        sampler = Sampler(SamplerSettings(vocabulary_size, (), threads), self.states)
        self._decisions = OwnDecisions(sampler, self.states)
        self._warm_up()

    def is_current(self) -> bool:
        """Whether the weights are those of before, by some of their rows: training changes all."""
        return torch.equal(self._weight[self._places], self._compared)

    def decide(self, hidden: torch.Tensor, names: RowNames) -> list[RowDecision | None]:
        """A decision per row of ``hidden`` [N, d], whose rows are ``names``; None where no token is
        left. Log-probabilities are those within the mask of the row, as vLLM gives them. Raises
        `NonFiniteHiddenError`."""
        pool.begin_step(len(hidden))
        found = self._head.candidates(hidden.detach().float().contiguous(), names)
        decided = self._decisions.submit(0, names, found).result()
        for row, mask in enumerate(names.masks):
            scored = decided[row]
            if mask is not None and scored is not None and scored.logprobs is not None:
                raw = np.full((1, self.vocabulary_size), -np.inf, np.float32)
                raw[0, mask.ids] = found.raw[found.offsets[row] :][mask.ids]
                token, count = np.array([scored.token_id]), len(scored.logprobs.top)
                decided[row] = RowDecision(scored.token_id, *token_logprobs(raw, token, [count]))
        return decided

    def _warm_up(self) -> None:
        """Drives what most steps need, so that no request waits for a compiler."""
        every = range(len(WARM_UP))
        hidden = self._compared[: len(every)].detach().float()  # not all alike, as zeros would be
        for sequence in every:
            self.states.open(sequence, Request("", 0, (0,), WARM_UP[sequence]))
        for sequences in (*((each,) for each in every), tuple(every)):
            self.decide(hidden[list(sequences)], RowNames(sequences))
        for sequence in every:
            self.states.close(sequence)


def _shard(
    weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, scale: float, size: int
) -> OutputHead:
    tiers = Ladder({"int8": quantize(weight.cpu(), "int8")}, ((1, "int8"),))
    if weight.is_cuda:
        from lexshard.actors.head.gpu.device_shard import DeviceShard  # needs Triton

        return DeviceShard(weight, bias, softcap, scale, size, tiers, device=weight.device)
    # A copy that is made when a screen needs it: most heads never do.
    packed = cache(lambda: pack(weight))
    dense = lambda hidden: linear(hidden, weight=packed())  # noqa: E731
    return Shard(weight, bias, softcap, scale, size, linear=dense, ladder=tiers)
