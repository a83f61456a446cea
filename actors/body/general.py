"""The general body: any transformers decoder whose attention can be replaced.

Every step is one packed sequence ``[1, T]`` without a transformers cache; keys and values live in
our blocks, and attention is `actors.body.paged_attention`. On the CPU activations are float32,
rounded to bfloat16 for products alone where that is the type, and every product goes through
kernels whose bits do not depend on the batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from lexshard.actors.body import paged_attention
from lexshard.actors.body.attention_step import AttentionSettings, AttentionStep, PlannedAttention
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.checkpoint import positions_of
from lexshard.actors.body.gpu.compiled_layers import (
    compile_layers,
    forget_caches,
    interpret_layers,
    place_caches,
)
from lexshard.actors.body.gpu.flash_attention import AttentionShape, FlashInferAttention
from lexshard.actors.body.gpu.merged_products import merge_products, split_products
from lexshard.actors.body.gpu.step_inputs import StepInputs, on_the_host, sent
from lexshard.actors.body.invariant.functions import finding_callers
from lexshard.actors.body.invariant.modules import has_bare_matrices, make_invariant
from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention.layout import kept_on_cpu

# torch's float32 linear gives a row the same bits from this many rows on (measured, 4 to 2,500).
LEAST_ROWS_OF_TORCH = 4


class GeneralBody:
    """Body over a transformers model; see ``actors.body.batch.Body`` for the contract.

    Takes the model over: its attention is switched to the paged one and, on the CPU, its linear
    layers are replaced by packed ones (``pack_linears`` off keeps torch's and pads every step to
    four rows; ``invariant`` off leaves everything as it is on a GPU). ``batch_invariant`` is False
    until the loader has proved it.
    """

    name = "general"

    def __init__(
        self,
        model: Any,
        *,
        pack_linears: bool = True,
        invariant: bool = True,
    ) -> None:
        paged_attention.register()
        model.set_attn_implementation(paged_attention.NAME)
        self._decoder = model.base_model.eval()
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        config = model.config.get_text_config(decoder=True)
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.batch_invariant = False
        self.vocabulary_size: int = embedding.shape[0]
        self.num_layers: int = config.num_hidden_layers
        heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.max_positions = positions_of(config)
        self._least_rows = 1
        self._callers_known = True
        if self.device.type == "cpu" and invariant:
            make_invariant(self._decoder, pack_linears=pack_linears)
            if has_bare_matrices(self._decoder):
                self._least_rows = LEAST_ROWS_OF_TORCH
            self._callers_known = False
        self._cache_dtype = torch.float32 if self.device.type == "cpu" else embedding.dtype
        # Per layer, known after the first step.
        self.settings: tuple[AttentionSettings, ...] = ()
        self.attention_shape = AttentionShape(
            heads, self.kv_heads, self.head_dim, self._cache_dtype
        )
        self.flash: FlashInferAttention | None = None
        self.attention = "attention by Triton"  # on a GPU, in words
        self.compiled = False
        self.layers = "layers as they are written"  # how they are computed, in words
        head = model.get_output_embeddings()  # a decoder alone has none
        self.hidden_size: int = config.hidden_size if head is None else head.weight.shape[1]

    def round_products(self) -> None:
        """From the next cache on, which must be a new one, a CPU rounds what weights are multiplied
        with to bfloat16, keys and values, too: torch's linear layers, if they were not packed
        before, become packed ones that do."""
        make_invariant(self._decoder, arithmetic="bfloat16")
        self._least_rows = LEAST_ROWS_OF_TORCH if has_bare_matrices(self._decoder) else 1
        self._cache_dtype = kept_on_cpu(self.head_dim, rounds=True)

    def kv_bytes_per_block(self) -> int:
        """Bytes of the keys and values of 16 tokens over all layers."""
        cells = 2 * self.num_layers * BLOCK_SIZE * self.kv_heads * self.head_dim
        return cells * self._cache_dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> None:
        """Reserve zeroed blocks for every layer, in the place of those there were (pages are
        touched when first written)."""
        self._caches = None  # before there are others
        forget_caches(self._decoder)
        self._caches = [
            allocate_cache(
                num_blocks,
                self.kv_heads,
                self.head_dim,
                device=self.device,
                dtype=self._cache_dtype,
            )
            for _ in range(self.num_layers)
        ]
        if self.compiled:
            place_caches(self._decoder, self._caches)

    def merge_products(self) -> None:
        """From the next step on products of one input are one (see
        `actors.body.gpu.merged_products`)."""
        merge_products(self._decoder)

    def split_products(self) -> None:
        """Undoes `merge_products`."""
        split_products(self._decoder)

    def compile_layers(self, backend: str = "inductor") -> None:
        """From the next step on the layers are compiled (`actors.body.gpu.compiled_layers`); the
        model must have computed a step, and have a cache. Raises UnsupportedModelError where that
        cannot be, and the next step RuntimeError where a layer does not compile."""
        assert self._caches is not None, "allocate_cache comes before this"
        compile_layers(self._decoder, backend)
        place_caches(self._decoder, self._caches)
        self.compiled, self.layers = True, "layers compiled"

    def interpret_layers(self, reason: str) -> None:
        """Undoes `compile_layers`, for a ``reason``."""
        interpret_layers(self._decoder)
        self.compiled, self.layers = False, f"layers not compiled ({reason})"

    def attend_by(self, flash: FlashInferAttention | None, reason: str = "") -> None:
        """From the next step on attention is ``flash``, or our kernels, for a ``reason``."""
        self.flash = flash
        self.attention = "attention by Triton" if flash is None else "attention by FlashInfer"
        if reason:
            self.attention += f" (FlashInfer: {reason})"

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of ``batch.output_rows`` after the final norm: ``[N, d] float32``.

        Raises UnsupportedModelError where the model's attention is not plain causal attention,
        and RuntimeError before `allocate_cache`.
        """
        on_host = self.device.type == "cpu"
        inputs = on_the_host(batch) if on_host else sent(batch, self.device)
        if self.flash is None:
            return self.compute(inputs)
        self.flash.of_any_shape.plan(batch)
        return self.compute(inputs, self.flash.of_any_shape)

    def compute(self, inputs: StepInputs, planned: PlannedAttention | None = None) -> torch.Tensor:
        """`forward` of a batch that is where the body is, and ``planned`` if anything is to
        attend in the place of our kernels. Waits for nothing on a GPU."""
        if self._caches is None:
            raise RuntimeError("call allocate_cache before forward")
        rows = inputs.token_ids.shape[0]
        padding = max(0, self._least_rows - rows)
        step = AttentionStep(
            caches=self._caches,
            rows=rows,
            slots=inputs.slots.long(),
            row_sequence=inputs.row_sequence,
            positions=inputs.positions,
            block_tables=inputs.block_tables,
            planned=planned,
        )
        first = nullcontext() if self._callers_known else finding_callers(self._decoder)
        with torch.inference_mode(), paged_attention.running(step), first:
            result = self._decoder(
                input_ids=_padded(inputs.token_ids, padding),
                position_ids=_padded(inputs.positions, padding),
                use_cache=False,
            )
            output_rows = inputs.output_rows.long()
            hidden: torch.Tensor = result.last_hidden_state[0][output_rows].float()
        self._callers_known = True
        if self.compiled:  # what layers ask for was seen before
            return hidden
        if len(step.settings) != self.num_layers:
            raise paged_attention.UnsupportedModelError(
                f"only {len(step.settings)} of {self.num_layers} layers attend: models with "
                "recurrent or convolutional layers keep a state that paged blocks do not hold"
            )
        self.settings = tuple(step.settings[layer] for layer in range(self.num_layers))
        return hidden


def _padded(values: torch.Tensor, padding: int) -> torch.Tensor:
    """``[1, T + padding] int64``; padded rows repeat token and position 0."""
    row = values.long()
    return torch.nn.functional.pad(row, (0, padding))[None] if padding else row[None]
