"""What the processor that numba compiles for can do."""

from __future__ import annotations

import llvmlite.binding
from numba import config


def has_feature(name: str) -> bool:
    """Whether code may use an instruction set, by LLVM's name for it."""
    chosen = config.CPU_FEATURES
    flags = llvmlite.binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{name}" in flags.split(",")
