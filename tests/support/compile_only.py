"""Compiles Triton kernels for a GPU that is not there, from the very calls that would launch them.

Launches become compilations for compute capability 9.0, down to machine code (Triton brings its own
assembler), so what a CUDA device would refuse is found without one. For a process of its own, since
it takes the place of Triton's driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

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


def check(compiled: list[Any]) -> None:
    for kernel in compiled:
        assert kernel.asm["cubin"], kernel.name
        assert kernel.metadata.shared <= LARGEST_SHARED_MEMORY, kernel.name
