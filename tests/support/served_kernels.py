"""Every launch that serving makes on a GPU, at real models' shapes and without their memory.

Tensors are on torch's meta device: they have shapes, types and strides, which is all that a
compiler asks. Run under `tests.support.compile_only.compiling`:

    python -m tests.support.served_kernels GROUP ...

compiles the groups named (all by default) and prints what each kernel takes of a multiprocessor;
ends with 1 where one spills registers or takes more shared memory than there is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from lexshard.kernels.attention import BLOCK_SIZE, allocate_cache
from lexshard.kernels.attention import triton_kernel as attention
from lexshard.kernels.blocks import BLOCK
from lexshard.kernels.quantize import quantize
from lexshard.kernels.rows import triton_kernel as rows_kernel
from lexshard.kernels.screen import Screened
from lexshard.kernels.screen.gpu import tensor_cores
from lexshard.kernels.search.gpu import search as device_search
from lexshard.kernels.truncate.triton_kernel import row_masses
from tests.support.compile_only import LARGEST_SHARED_MEMORY, MachineCode, compiling, machine_code

META = "meta"
LEADERS = 64
CAPACITY = 1024


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    window: int = 0
    softcap: float = 0.0


class HeadShape(NamedTuple):
    vocabulary: int
    columns: int
    softcap: float | None = None


ATTENTION = {
    "Llama 3.1 8B": AttentionShape(32, 8, 128),
    "Qwen 2.5 7B": AttentionShape(28, 4, 128),
    "Gemma 2 2B": AttentionShape(8, 4, 256, 4096, 50.0),
    "Phi 3 mini": AttentionShape(32, 32, 96, 2047),
    "8B, rank of 8": AttentionShape(4, 1, 128),
    "70B, rank of 8": AttentionShape(8, 1, 128),
}
HEADS = {
    "Llama 3.1 8B": HeadShape(128_256, 4_096),
    "8B, shard of 8": HeadShape(16_032, 4_096),
    "Qwen 2.5 7B": HeadShape(151_936, 3_584),
    "Gemma 2 2B": HeadShape(262_144, 2_304, 30.0),
    "70B": HeadShape(128_256, 8_192),
    "70B, shard of 8": HeadShape(16_032, 8_192),
}
CONTEXT = 8192
# Rows, and tokens of the widest context: each way of dividing keys among programs.
STEPS = (
    *((rows, CONTEXT) for rows in (1, 8, 64, 512)),
    *((1, 131_072), (64, 1024), (512, 131_072)),
)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def launch_attention(shape: AttentionShape, dtype: torch.dtype, rows: int, context: int) -> None:
    key_cache, value_cache = allocate_cache(
        64, shape.kv_heads, shape.width, device=META, dtype=dtype
    )
    query = empty(rows, shape.heads, shape.width, dtype=dtype)
    own = empty(rows, shape.kv_heads, shape.width, dtype=dtype)
    attention.write_cache(own, own, empty(rows, dtype=torch.int64), key_cache, value_cache)
    attention.paged_attention(
        query,
        key_cache,
        value_cache,
        empty(min(rows, 64), context // BLOCK_SIZE, dtype=torch.int32),
        empty(rows, dtype=torch.int32),
        empty(rows, dtype=torch.int32),
        shape.width**-0.5,
        shape.window,
        shape.softcap,
        torch.empty_like(query),
    )


def placed_tier(shape: HeadShape) -> tensor_cores.PlacedTier:
    """A tier of so many rows in which nothing stands."""
    direction = np.ones(shape.columns, np.float32)
    small = quantize(torch.ones(64, shape.columns), "int8", direction=direction)
    placed = tensor_cores.place(small, "cpu")
    size = shape.vocabulary

    def grown(tensor: torch.Tensor | None, axis: int) -> Any:
        if tensor is None:
            return None
        lengths = list(tensor.shape)
        lengths[axis] = size
        return empty(*lengths, dtype=tensor.dtype)

    return tensor_cores.PlacedTier(
        placed.tier,
        grown(placed.values, 0),
        grown(placed.scale, 0),
        grown(placed.row_slack, 1),
        None if placed.direction is None else placed.direction.to(META),
        grown(placed.products, 0),
        placed.constants.to(META),
    )


def launch_screen(shape: HeadShape, rows: int) -> None:
    tensor_cores.screen(empty(rows, shape.columns), placed_tier(shape))


def launch_search(shape: HeadShape, rows: int) -> None:
    size = shape.vocabulary
    bias = empty(size) if shape.softcap else None
    post = device_search.PostProcessing(bias, 1.0, shape.softcap, empty(5, dtype=torch.float64))
    hidden = empty(rows, shape.columns)
    questions = device_search.Questions(
        empty(rows, 5, dtype=torch.int64), empty(rows, 9, dtype=torch.float64)
    )
    support = device_search.Support(
        empty(rows + 1, dtype=torch.int64), empty(1 << 17, 6, dtype=torch.int32)
    )
    workspace = device_search.allocate(rows, size, capacity=CAPACITY, leaders=LEADERS, device=META)
    device_search.begin(hidden, questions, workspace)
    device_search.amend(support, empty(rows, dtype=torch.int32), questions)
    device_search.search(
        hidden,
        empty(size, shape.columns, dtype=torch.bfloat16),
        Screened(empty(rows, size), empty(2, size), empty(rows, 2, dtype=torch.float64)),
        post,
        questions,
        support,
        workspace,
        masks=device_search.RowMasks(
            empty(rows, size // BLOCK, dtype=torch.int64),
            empty(rows, dtype=torch.int64),
            size // BLOCK,
        ),
    )


def launch_dense_rows(shape: HeadShape, rows: int) -> None:
    weight = empty(shape.vocabulary, shape.columns, dtype=torch.bfloat16)
    hidden = empty(rows, shape.columns)
    rows_kernel.canonical_logits(hidden, weight, None, None)
    counted = empty(dtype=torch.int64)
    rows_kernel.every_logit(rows_kernel.Factors.of(hidden, weight), counted)
    row_masses(empty(rows, shape.vocabulary), empty(rows, dtype=torch.float64))


def attention_cases(dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    return {
        f"{model}, {rows} x {context}": partial(launch_attention, shape, dtype, rows, context)
        for model, shape in ATTENTION.items()
        for rows, context in STEPS
    }


def head_cases(
    launch: Callable[[HeadShape, int], None], rows: Sequence[int] = (1, 8, 64)
) -> dict[str, Callable[[], None]]:
    return {
        f"{model}, {count} rows": partial(launch, shape, count)
        for model, shape in HEADS.items()
        for count in rows
    }


GROUPS: dict[str, dict[str, Callable[[], None]]] = {
    "attention-bf16": attention_cases(torch.bfloat16),
    "attention-fp16": attention_cases(torch.float16),
    "attention-fp32": attention_cases(torch.float32),
    "int8": head_cases(launch_screen, (1, 8, 16, 32, 64)),
    "search": head_cases(launch_search),
    "rows": head_cases(launch_dense_rows, (1, 4, 32)),
}


def compile_group(name: str) -> list[tuple[str, MachineCode]]:
    """Every different kernel of a group, with the case that needed it first."""
    found: dict[str, tuple[str, MachineCode]] = {}
    for case, launch in GROUPS[name].items():
        with compiling() as compiled:
            launch()
        for kernel in compiled:
            if kernel.hash not in found:
                found[kernel.hash] = (case, machine_code(kernel))
    return list(found.values())


def line(group: str, case: str, code: MachineCode) -> str:
    """What a kernel takes, as a row of the table that `main` prints."""
    fits = code.stack_bytes == 0 and code.shared_bytes <= LARGEST_SHARED_MEMORY
    return (
        f"{group:15} {case:24} {code.name:18} {code.warps:2} warps {code.registers:4} registers "
        f"{code.stack_bytes:6} B stack {code.shared_bytes:7} B shared "
        f"{code.instructions:6} instructions, {code.loop:4} in a loop"
        f"{'' if fits else '  <-- does not fit'}"
    )


def main(names: Sequence[str]) -> int:
    print(f"Triton {triton.__version__}, compute capability 9.0")
    unsound = 0
    for name in names or GROUPS:
        for case, code in compile_group(name):
            told = line(name, case, code)
            unsound += told.endswith("does not fit")
            print(told, flush=True)
    return int(unsound > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
