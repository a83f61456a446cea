"""From hidden states of any model to its next tokens: those of a head that reads everything.

Numpy, numba and torch are enough for it.
"""

from __future__ import annotations

from functools import cache

import torch

from lexshard.actors.candidates import Candidates
from lexshard.actors.decision.messages import SamplerSettings
from lexshard.actors.decision.own import OwnDecisions
from lexshard.actors.decision.sampler import Sampler
from lexshard.actors.decision.warm_up import KINDS
from lexshard.actors.head.ladder import Ladder
from lexshard.actors.head.output_head import OutputHead
from lexshard.actors.head.owned_rows import OwnedRows
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
# What most steps need: these together, alone what is not top-k.
WARM_UP = (
    *KINDS,
    SamplingParameters(temperature=0.0),
    *(SamplingParameters(temperature=0.8, min_p=p, top_p=1.0 - p) for p in (0.0, 0.1)),
)


class DrawingHead:
    """Candidates and draws from the rows of ``weight`` [V or more, d], fp32 or bf16, for sequences
    whose ``states`` the caller opens, appends to and closes; ``masks`` make what a grammar allows
    of words of bits. A logit is the product, ``bias``
    [V or more] added, times ``scale``, soft-capped; it cannot be both scaled and capped.

    It computes on as many threads as torch does. Raises ValueError where the weights or the bias
    are not finite.
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
        last = min(len(weight), vocabulary_size) - 1
        spread = torch.linspace(0, last, COMPARED_ROWS, device=weight.device)
        self._places = spread.long()
        self._compared = weight[self._places].clone()
        shard = self._shard(weight.detach(), bias, softcap, scale)
        self._head = SequenceHead(shard, self.states)
        threads = torch.get_num_threads()
        pool.set_threads(threads)
        sampler = Sampler(SamplerSettings(vocabulary_size, (), threads), self.states)
        self._decisions = OwnDecisions(sampler, self.states)
        self._warm_up(weight.detach()[: len(WARM_UP)].float())  # not all alike, as zeros would be

    def is_current(self) -> bool:
        """Whether the weights are those of before, by some of their rows: training changes all."""
        return torch.equal(self._weight[self._places], self._compared)

    def decide(self, hidden: torch.Tensor, names: RowNames) -> list[RowDecision | None]:
        """A decision per row of ``hidden`` [N, d], whose rows are ``names``; None where no token is
        left. Raises `NonFiniteHiddenError`."""
        names = names._replace()  # another object: those of a step are known by it
        pool.begin_step(len(hidden))
        found = self._head.candidates(hidden.detach().float().contiguous(), names)
        return self._decided(names, found)

    def _decided(self, names: RowNames, found: Candidates) -> list[RowDecision | None]:
        """A decision per row of ``names``, whose candidates are ``found``."""
        return self._decisions.submit(0, names, found).result()

    def _shard(
        self, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, scale: float
    ) -> OutputHead:
        """What finds the candidates."""
        every = OwnedRows.every(self.vocabulary_size)
        return screened_shard(weight, bias, softcap, scale, every)

    def _warm_up(self, hidden: torch.Tensor) -> None:
        """Drives what most steps need, so that no request waits for a compiler."""
        every = range(len(hidden))
        for sequence in every:
            self.states.open(sequence, Request("", 0, (0,), WARM_UP[sequence]))
        for sequences in (*((each,) for each in every), tuple(every)):
            self.decide(hidden[list(sequences)], RowNames(sequences))
        for sequence in every:
            self.states.close(sequence)


def screened_shard(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    scale: float,
    owned: OwnedRows,
) -> OutputHead:
    """A shard of the ``owned`` tokens, which the first rows of ``weight`` are, screened in int8.
    Raises ValueError where weights or bias are not finite."""
    own = weight[: len(owned.ids)]
    own = own.bfloat16() if fits_bfloat16(own) else own
    head = own, bias, softcap, scale, owned.vocabulary_size
    tier = quantize(own.cpu(), "int8")
    if own.is_cuda:
        from lexshard.actors.head.gpu.device_shard import DeviceShard  # needs Triton

        return DeviceShard(*head, tier, device=own.device, owned=owned)
    # A copy that is made when a screen needs it: most heads never do.
    packed = cache(lambda: pack(own))
    dense = lambda hidden: linear(hidden, weight=packed())  # noqa: E731
    ladder = Ladder({"int8": tier}, ((1, "int8"),))
    return Shard(*head, linear=dense, ladder=ladder, owned=owned)
