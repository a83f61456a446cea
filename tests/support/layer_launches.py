"""What a compiled layer launches in a step of decoding on a GPU, counted without one.

The body compiles its layers, and torch writes their code for a GPU of capability 9.0, of tensors
that have shapes and no memory. The calls in that code are counted, and those that attention makes
where it is called; nothing is compiled further, or runs. For a process of its own, since torch is
told that its CPU is such a GPU:

    python -m tests.support.layer_launches

prints the launches of a layer of Llama 3.1 8B's shape, for steps of 1 and of 64 sequences: code for
one row, and for any number. A second launch of cuBLAS for a product is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CpuDeviceProperties, CpuInterface
from torch._inductor import config as inductor
from torch._inductor import scheduler, utils
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lexshard.actors.body import paged_attention
from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.step_inputs import StepInputs
from lexshard.kernels import attention
from tests.support.compile_only import AbsentGpu
from tests.support.recorded_steps import Tape

GPU = torch.device("cpu:0")  # with a number, as torch asks of a GPU
PROPERTIES = CpuDeviceProperties(multi_processor_count=132)
BLOCKS = 512  # of the widest context
LAYERS = 2
SHAPE = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": LAYERS}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
# Numbers of Python's that are put into a GPU's memory stay on the host.
SILENT = ("empty", "empty_like", "new_empty", "scalar_tensor")
# A GPU computes parts of a tensor where they are read, a CPU writes them side by side.
OF_A_GPU = {"cpu_backend": "triton", "force_pointwise_cat": True, "fx_graph_cache": False}


@contextmanager
def _as_on_a_gpu(codes: list[str], attended: list[str]) -> Iterator[None]:
    """Code that torch writes goes to ``codes``, what attention launches to ``attended``."""

    def written(graph: GraphLowering) -> None:
        codes.append(graph.codegen()[0].value)
        raise RuntimeError("nothing runs here")

    def launched(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: attended.append(kernel.__name__)

    attend = paged_attention.attend_in_step

    def attend_noted(*arguments: Any) -> torch.Tensor:
        with Tape() as tape:
            result = attend(*arguments)
        for func, _, _, made in tape.calls:
            writes = not func.is_view and func.overloadpacket.__name__ not in SILENT
            if writes and isinstance(made, torch.Tensor) and made.numel():
                attended.append(str(func))
        return result

    driver.set_active(AbsentGpu())  # type: ignore[arg-type]
    groups = scheduler.ForeachKernelSchedulerNode
    by_triton: dict[str, Any] = {"implementation": "triton"}
    with ExitStack() as patches:
        for target, name, value in (
            (GraphLowering, "compile_to_module", written),
            (JITFunction, "__getitem__", launched),
            (paged_attention, "attend_in_step", attend_noted),
            (paged_attention, "write_cache", partial(attention.write_cache, **by_triton)),
            (paged_attention, "paged_attention", partial(attention.paged_attention, **by_triton)),
            (CpuInterface.Worker, "get_device_properties", lambda device: PROPERTIES),
            (utils, "GPU_TYPES", [*utils.GPU_TYPES, GPU.type]),
            (scheduler, "has_triton", lambda: True),
            # What could be one launch; torch's own choice leaves out what is a CPU's.
            (groups, "group_algorithm_for_combo_kernels", lambda of: of._topological_sort_nodes()),
        ):
            patches.enter_context(patch.object(target, name, value))
        with inductor.patch(OF_A_GPU), FakeTensorMode(allow_non_fake_inputs=True):
            yield


def main() -> None:
    codes: list[str] = []
    attended: list[str] = []
    with _as_on_a_gpu(codes, attended):
        with torch.device(GPU):
            model = AutoModelForCausalLM.from_config(
                LlamaConfig(**SHAPE, **HEADS), dtype=torch.bfloat16, attn_implementation="eager"
            )
        body = GeneralBody(model.eval().requires_grad_(False), invariant=False)
        body._cache_dtype = torch.bfloat16  # a CPU's would be float32
        body.merge_products()
        body.allocate_cache(BLOCKS)
        for rows in (1, 64):
            row = torch.zeros(rows, dtype=torch.int32, device=GPU)
            inputs = StepInputs(row, row, row, row, row, row[:, None].expand(rows, BLOCKS))
            attended.clear()
            body.compute(inputs)  # once as it is written
            body.compile_layers()
            with suppress(RuntimeError):
                body.compute(inputs)
            body.interpret_layers("for the next step")
            own = re.findall(r"^ +(triton_\w+(?=\.run)|extern_kernels\.\w+)", codes.pop(), re.M)
            launches = [*own, *attended[: len(attended) // LAYERS]]
            print(f"{rows} rows: {len(launches)}", *launches, sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
