"""The processor that kernels are compiled for: this one, or one that can do less.

Register tiles and screens take the widest vectors there are, and none of that may change a bit. So
that one machine can show it, ``LEXSHARD_CPU=avx2`` compiles as on a processor without AVX-512.
numba's cache tells the two apart: processor and instruction sets are part of its keys.

One instruction set does change bits. AMX multiplies whole matrices of bfloat16, up to ten times as
fast as anything else, and adds in an order of its own (`kernels.linear.matrix`). Products of
bfloat16 are summed so where there is AMX, and with ``LEXSHARD_CPU=amx`` everywhere, with vectors
where it must be: slow, but the same bits. ``avx512`` is a processor without it; ``vectors`` is this
one without it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

import llvmlite.binding
from numba import config

VARIABLE = "LEXSHARD_CPU"
CHOICES = ("avx2", "avx512", "amx", "vectors")
# Name and features, in LLVM's words, and what a processor that is told to be so must have.
_AVX2 = ("haswell", "+sse4.2,+avx,+avx2,+fma")
_NEEDED = {"avx2": "sse4.2,avx,avx2,fma", "avx512": "avx512f,avx512bw", "amx": "avx2,fma"}
_MATRICES = "amx-bf16"
# Linux gives each process the registers of matrices when it asks for them (arch_prctl).
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


def choose_processor() -> None:
    """Compile for the processor that ``LEXSHARD_CPU`` names, here and in every child process.

    Without it nothing changes, unless a processor has AMX and the system keeps it to itself:
    numba's own ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` count.

    Raises:
        ValueError: it names a processor that is unknown, or that can do what this one cannot.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen == "vectors" or not chosen:
        if not has_feature(_MATRICES) or (not chosen and _may_multiply_matrices()):
            return
        chosen = "avx512"
    if chosen not in CHOICES:
        raise ValueError(f"{VARIABLE} is {chosen!r}: it can be {', '.join(CHOICES)} or unset")
    here = llvmlite.binding.get_host_cpu_features()
    lacking = [each for each in _NEEDED[chosen].split(",") if not here.get(each)]
    if lacking:
        raise ValueError(f"{VARIABLE} is {chosen!r}, but this processor has no {lacking[0]}")
    if chosen == "avx2":
        name, features = _AVX2
    else:
        if chosen == "amx" and has_feature(_MATRICES) and _may_multiply_matrices():
            return
        name, features = llvmlite.binding.get_host_cpu_name(), here.flatten()
        features = features.replace("+amx", "-amx")
        if chosen == "amx":
            features += f",-{_MATRICES}"  # twice: what is compiled so is kept apart from the rest
    # Variables, because numba reads them again while it compiles, and children inherit them.
    os.environ.update(NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    config.CPU_NAME, config.CPU_FEATURES = name, features


@functools.cache
def _may_multiply_matrices() -> bool:
    """Whether this process has the registers of matrices; asks the system for them."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def multiplies_matrices() -> bool:
    """Whether products of bfloat16 are computed with AMX."""
    return has_feature(_MATRICES)


def sums_as_matrices() -> bool:
    """Whether products of bfloat16 are summed in the order of AMX."""
    return multiplies_matrices() or os.environ.get(VARIABLE) == "amx"


def instructions() -> str:
    """The widest vectors that code may use, or what tells that products are summed in another
    order, in words."""
    if sums_as_matrices():
        return "AMX"
    known = {"avx512f": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
    return next((word for name, word in known.items() if has_feature(name)), "plain")


def processor_name() -> str:
    """LLVM's name for what code is compiled for, ``znver4`` for one."""
    return config.CPU_NAME or llvmlite.binding.get_host_cpu_name()


def has_feature(name: str) -> bool:
    """Whether code may use an instruction set, by LLVM's name for it."""
    chosen = config.CPU_FEATURES
    flags = llvmlite.binding.get_host_cpu_features().flatten() if chosen is None else chosen
    return f"+{name}" in flags.split(",")
