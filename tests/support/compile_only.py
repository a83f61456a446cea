"""Compiles Triton kernels for a GPU that is not there, from the very calls that would launch them.

Launches become compilations for compute capability 9.0, down to machine code (Triton brings its own
assembler), so what a CUDA device would refuse is found without one. For a process of its own, since
it takes the place of Triton's driver.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

INSTRUCTION_BYTES = 16
LARGEST_SHARED_MEMORY = 227 * 1024  # bytes a program may have on an H100 or H200


class AbsentGpu:
    """What the launcher asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[Any]]:
    """Every launch inside appends its compiled kernel to the list instead of running."""
    compiled: list[Any] = []

    def compile_kernel(function: Any, *arguments: Any, grid: Any, **options: Any) -> None:
        compiled.append(function.run(*arguments, grid=grid, warmup=True, **options))

    launch = JITFunction.__getitem__
    driver.set_active(AbsentGpu())  # type: ignore[arg-type]
    JITFunction.__getitem__ = lambda self, grid: partial(compile_kernel, self, grid=grid)
    try:
        yield compiled
    finally:
        JITFunction.__getitem__ = launch


@dataclass(frozen=True, slots=True)
class MachineCode:
    """What a compiled kernel takes of a multiprocessor, as its machine code says."""

    name: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread: registers that were spilled
    shared_bytes: int  # of a program
    instructions: int  # in the code, each loop counted once
    loop: int  # of these in its longest loop
    warps: int


def machine_code(kernel: Any) -> MachineCode:
    """Read from the code itself by the disassembler that Triton brings."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([tool, option, file], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[0]) for word in ("REG", "STACK"))
    # A frame that no instruction touches is what a compiler has left behind, not a spill.
    touched = re.search(r"\b(LDL|STL)\b", code) is not None
    # Addresses of instructions; the lines between them are the other half of their encoding.
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?!NOP|BRA `)[@A-Z]", code)
    branches = re.findall(r"/\*([0-9a-f]{4,})\*/[^;]*\bBRA\S* (?:\S+, )?0x([0-9a-f]+)", code)
    spans = [int(here, 16) - int(there, 16) for here, there in branches]
    loop = max(0, *spans) // INSTRUCTION_BYTES + 1 if any(span > 0 for span in spans) else 0
    return MachineCode(
        kernel.name,
        registers,
        stack if touched else 0,
        kernel.metadata.shared,
        len(instructions),
        loop,
        kernel.metadata.num_warps,
    )


def check(compiled: list[Any]) -> None:
    for kernel in compiled:
        assert kernel.asm["cubin"], kernel.name
        assert kernel.metadata.shared <= LARGEST_SHARED_MEMORY, kernel.name
