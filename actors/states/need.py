"""What one row asks of a head, made from its sequence's state wherever that is kept.

Needs do not travel: their arrays are those of the state they were made from. Names of rows and
deltas travel (`actors.states.deltas`), and a head elsewhere makes the same needs from its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import NeedKind
from lexshard.actors.proposal import GuessTest
from lexshard.actors.states.mask import Mask


@dataclass(frozen=True, slots=True, eq=False)
class Adjustment:
    """The processors of one row before temperature, as data: what SIMPLE calls penalties.

    A raw logit ``l`` of token ``i`` becomes, in fp32 and in this order: ``-inf`` if ``mask`` is
    given and lacks ``i`` or if ``i`` is in ``banned``; ``l + bias``; then, for tokens seen in
    prompt or output, ``l / repetition`` if positive else ``l * repetition``; then, for tokens
    seen in the output, ``l - frequency * count`` and ``l - presence``.

    What was seen stands in row ``table`` of ``tables`` (`actors.states.penalty_tables`): 0 for a
    token never seen, otherwise 1 + how often it stands in the output (1: prompt only). ``table`` is
    -1 where nothing is penalised. ``seen`` gives the ids of that row where they are kept. All
    id arrays are sorted and distinct.
    """

    repetition: float
    frequency: float
    presence: float
    tables: npt.NDArray[np.int32] | None  # [S, W], W at least the vocabulary size
    table: int
    bias_ids: npt.NDArray[np.int32]
    bias_values: npt.NDArray[np.float32]
    banned: npt.NDArray[np.int32]
    mask: Mask | None
    seen: Callable[[], npt.NDArray[np.int32]] | None = None

    def seen_ids(self) -> npt.NDArray[np.int32]:
        """The ids seen by what is penalised; none where nothing is."""
        if self.tables is None or self.table < 0:
            return np.empty(0, np.int32)
        if self.seen is not None:
            return self.seen()
        return np.flatnonzero(self.tables[self.table]).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """The guarantee one row asks of the head, and all that the head must know to give it.

    - ``top1``: the argmax of ``f64(l) * f64(inverse_temperature) + f64(noise)`` over every token
      (greedy where ``inverse_temperature`` is 0: the argmax of ``l``).
    - ``topk``: the exact ``k`` best tokens, ties to the lower id.
    - ``minp``: every token with ``l * inverse_temperature >= l_max * inverse_temperature + ln
      min_p``.
    - ``nucleus``: exactly the fewest best tokens that hold ``top_p`` of the whole softmax at this
      temperature, as `kernels.truncate` defines them.
    - ``nucleus-draw``: the argmax of ``top1`` among the tokens of that nucleus.
    - ``epsilon``: tokens outside of which at most ``epsilon`` of the whole softmax lies; a draw
      from them is within ``epsilon`` of the exact one in total variation, and not the exact one.
    - ``dense``: the canonical logit of every token (returned logprobs). A row with a ``guess``
      wants to know what testing it leads to, nothing being truncated: a head may give the one token
      that the row emits instead.

    - ``labels``: the canonical logit of every token that its mask holds, and of no other.

    ``l`` is the canonical logit after ``adjustment``. ``key`` and ``position`` name the noise
    (CERTIFICATES 4); ``position`` is the index of the token being drawn in prompt + output.
    """

    kind: NeedKind
    k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0
    epsilon: float = 0.0
    key: int = 0
    position: int = 0
    inverse_temperature: float = 0.0
    adjustment: Adjustment | None = None
    guess: GuessTest | None = None
