"""One rank of a parallel body that is a decoder of torch: on a GPU, or the general body of a CPU.

The decoder has this rank's heads and inner columns alone, which transformers makes of a
configuration that says so; two products a layer, and the embedding, are added up
(`actors.body.parallel.sums`). Graphs and libraries of attention are those of a body that is on one
GPU: a graph records the sums, too.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.checked import (
    attend_checked,
    compile_checked,
    graphed_body,
    merge_checked,
)
from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.body.gpu.rounding import tolerated
from lexshard.actors.body.model_code import without_a_word
from lexshard.actors.body.parallel.share import RankShare, columns_of
from lexshard.actors.body.parallel.slices import Slices, there
from lexshard.actors.body.parallel.sums import (
    GroupSums,
    OneRank,
    RankGroup,
    RankLostError,
    RankSums,
    add_up,
)
from lexshard.actors.body.self_test import LENGTHS, TOLERANCES, Expected, run_alone, run_mixed
from lexshard.kernels.parallel import Exchange

SOME_TOKENS = tuple(tuple((7 * i + 3) % 89 for i in range(length)) for length in LENGTHS)
_PREFIX = "model."  # of a decoder's weights, in the files of a causal language model


@dataclass(frozen=True, slots=True)
class FastLayers:
    """What else than transformers' code computes the layers of a GPU's rank, where it is right:
    compiled layers, FlashInfer."""

    compiled: bool
    flash: bool


class GeneralRank:
    """What ``share`` says of the decoder that transformers' ``config`` describes, its weights read
    by ``slices``, which rounds them to ``dtype``.

    On a GPU steps are in graphs and layers are computed as ``fast`` says, None: as they come.
    Raises KeyError for a weight that there must be and is not.
    """

    def __init__(
        self,
        config: Any,
        share: RankShare,
        slices: Slices,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fast: FastLayers | None = None,
    ) -> None:
        self.share = share
        self.device = device
        self._sums = GroupSums()
        rounds = device.type == "cpu" and dtype == torch.bfloat16
        decoder = decoder_of(config, share, slices, torch.float32 if rounds else dtype).to(device)
        add_up(decoder, share.tokens.start, self._sums)
        body = GeneralBody(decoder, pack_linears=not rounds)
        if rounds:
            body.round_products()
        self._body: GeneralBody | GraphedBody = body
        if device.type == "cuda" and fast is not None:
            expected, tolerance = quicken(body, TOLERANCES[dtype], fast)
            self._body = graphed_body(body, expected, tolerance, batch_invariant=False)

    @property
    def description(self) -> str:
        """What is in graphs, in words."""
        if isinstance(self._body, GraphedBody):
            return self._body.description
        return f"without CUDA graphs; {self._body.attention}"

    @property
    def kv_bytes_per_block(self) -> int:
        return self._body.kv_bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        """Zeroed blocks of 16 tokens of this rank's heads, for every layer. Graphs go: they know
        the cache, and the group whose sums they recorded."""
        self._body.allocate_cache(num_blocks)

    def record(self, sequences: int, blocks: int) -> None:
        """`GraphedBody.record`; all ranks record the same, with the sums of the last step."""
        if isinstance(self._body, GraphedBody):
            self._body.record(sequences, blocks)

    def forward(self, batch: Batch, group: RankGroup) -> torch.Tensor | None:
        """Hidden states of ``batch.output_rows`` after the final norm, ``[N, d]``; None where a
        rank did not take part to the end."""
        sums = self._sum_by(group)
        try:
            hidden = self._body.forward(batch)
            # The others must hear at once that a group has ended, whatever their GPUs wait for.
            whole = self.share.rank > 0 or sums.complete()
            return hidden if whole else None
        except RankLostError:
            return None

    def memory(self) -> tuple[int, int]:
        """`BodyOfDevices.memory`."""
        assert isinstance(self._body, GraphedBody), "a rank on a GPU has graphs"
        return self._body.memory()

    def warm_up(self) -> None:
        """Loads or compiles all that `forward` calls. Leaves the rank without a cache of use."""
        self.allocate(1)
        self._run_one(self._body)

    def _run_one(self, body: GeneralBody | GraphedBody) -> None:
        """A step of one token, as if there were no other ranks."""
        some = np.zeros(1, np.int32)
        self._sums.group = OneRank()
        body.forward(Batch(some, some, some.astype(np.int64), some, some[None], some))

    def _sum_by(self, group: RankGroup) -> RankSums:
        assert not isinstance(group, Exchange), "a decoder of torch adds by sums"
        self._sums.group = group
        return group


def quicken(
    body: GeneralBody, tolerance: float, fast: FastLayers, backend: str = "inductor"
) -> tuple[Expected, float]:
    """What computes the layers of ``body`` faster, if that is what they compute without, which
    comes back, with the difference to it that was tolerated: of this rank's parts alone, as if
    there were no others. Leaves a test cache."""
    expected = Expected(SOME_TOKENS, tuple(run_alone(body, SOME_TOKENS)), ())
    tolerance = tolerated(expected.hidden, run_mixed(body, SOME_TOKENS), tolerance)
    merge_checked(body, expected, tolerance)
    if fast.flash:
        attend_checked(body, expected, tolerance)
    if fast.compiled:
        compile_checked(body, expected, tolerance, backend)
    return expected, tolerance


def part_of(name: str, share: RankShare) -> tuple[range | None, range | None]:
    """Rows and columns that ``share`` has of the decoder's weight ``name``, None: all."""
    width = share.whole.head_dim
    match name.split(".")[-2:]:
        case ["q_proj", _]:
            return columns_of(share.heads, width), None
        case ["k_proj" | "v_proj", _]:
            return columns_of(share.kv_heads, width), None
        case ["o_proj", "weight"]:
            return None, columns_of(share.heads, width)
        case ["gate_proj" | "up_proj", _]:
            return share.inner, None
        case ["down_proj", "weight"]:
            return None, share.inner
        case ["embed_tokens", _]:
            return share.tokens, None
    return None, None


def decoder_of(config: Any, share: RankShare, slices: Slices, dtype: torch.dtype) -> Any:
    """The decoder of ``config`` with ``share`` of every weight, on the CPU."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    own = deepcopy(config)
    own.vocab_size, own.pad_token_id = len(share.tokens), None
    own.head_dim = share.whole.head_dim
    own.num_attention_heads, own.num_key_value_heads = len(share.heads), len(share.kv_heads)
    own.intermediate_size = len(share.inner)
    kind = MODEL_MAPPING[type(config)]
    with torch.device("meta"):
        names = [*kind(own).state_dict()]
    weights = {
        name: there(_PREFIX + name, slices, *part_of(name, share)).to(dtype) for name in names
    }
    with without_a_word():
        decoder = kind.from_pretrained(
            None, config=own, state_dict=weights, dtype=dtype, attn_implementation="eager"
        )
    return decoder.eval().requires_grad_(False)
