"""The processor that kernels are compiled for: this one, or any that has AVX2 but no AVX-512.

Register tiles and screens take the widest vectors there are, and none of that may change a bit. So
that one machine can show it, ``LEXSHARD_CPU=avx2`` compiles as on a processor without AVX-512.
numba's cache tells the two apart: processor and instruction sets are part of its keys.
"""

from __future__ import annotations

import os

import llvmlite.binding
from numba import config

VARIABLE = "LEXSHARD_CPU"
CHOICES = {"avx2": ("haswell", "+sse4.2,+avx,+avx2,+fma")}  # name and features, in LLVM's words


def choose_processor() -> None:
    """Compile for the processor that ``LEXSHARD_CPU`` names, here and in every child process.

    Without it nothing changes: numba's own ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` count.

    Raises:
        ValueError: it names a processor that is unknown, or that can do what this one cannot.
    """
    chosen = os.environ.get(VARIABLE)
    if not chosen:
        return
    if chosen not in CHOICES:
        raise ValueError(f"{VARIABLE} is {chosen!r}: it can be {', '.join(CHOICES)} or unset")
    name, features = CHOICES[chosen]
    here = llvmlite.binding.get_host_cpu_features()
    lacking = [each[1:] for each in features.split(",") if not here.get(each[1:])]
    if lacking:
        raise ValueError(f"{VARIABLE} is {chosen!r}, but this processor has no {lacking[0]}")
    # Variables, because numba reads them again while it compiles, and children inherit them.
    os.environ.update(NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    config.CPU_NAME, config.CPU_FEATURES = name, features


def instructions() -> str:
    """The widest vectors that code may use, in words."""
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    return next((word for name, word in known.items() if has_feature(name)), "plain")


def has_feature(name: str) -> bool:
    """Whether code may use an instruction set, by LLVM's name for it."""
    chosen = config.CPU_FEATURES
    flags = llvmlite.binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{name}" in flags.split(",")
