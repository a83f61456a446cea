"""A kernel from the cache takes memory for its machine code, and for nothing else.

numba makes more of it: an LLVM module, for kernels that would call it, several times as large as
what is read; the machine code of its own runtime, of which every kernel in the cache has what it
calls; and it imports scipy's linear algebra to see that it is there. A process that compiles
nothing needs none of that, and one that compiles gets it then: a fifth of an engine's memory.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
import numba.core.codegen
import numba.core.runtime.nrtdynmod

# As far as types go, these are anything: they are numba's own business.
_library: Any = numba.core.codegen.JITCodeLibrary
_runtime: Any = numba.core.runtime.nrtdynmod
# Functions that are looked for by their names: called from Python, and from C.
_CALLED = re.compile(rb"_ZN(?:7cpython|5cfunc)[^\0]+")
_COMPILES = "compile_nrt_functions"  # numba's own runtime
_UNPARSED = "_lexshard_unparsed"  # of a library: the LLVM module that has not been asked for


@functools.cache
def load_code_alone() -> None:
    """From now on all that is loaded from a cache of numba's is machine code alone: for processes
    of our own, as it holds for all kernels there. With a numba that is made otherwise all is
    loaded as ever."""
    needed = ("_unserialize", "_get_module_for_linking", "get_pointer_to_function")
    if not (all(hasattr(_library, each) for each in needed) and hasattr(_runtime, _COMPILES)):
        return
    unserialize, linked = _library._unserialize.__func__, _library._get_module_for_linking
    address_of, compile_runtime = _library.get_pointer_to_function, _runtime.compile_nrt_functions

    def from_cache(cls: Any, codegen: Any, state: Any) -> Any:
        name, kind, data = state
        if kind != "object":
            return unserialize(cls, codegen, state)
        code, module = data
        self = unserialize(cls, codegen, (name, kind, (code, _nothing())))
        self._shared_module = None
        vars(self)[_UNPARSED] = module
        codegen._engine._defined_symbols |= {each.decode() for each in _CALLED.findall(code)}
        return self

    def parsed(self: Any) -> Any:
        module = vars(self).pop(_UNPARSED, None)
        if module is not None:
            self._shared_module = llvm.parse_bitcode(module)
            self._codegen._engine._load_defined_symbols(self._shared_module)
        return linked(self)

    def found(self: Any, name: str) -> Any:
        if _UNPARSED in vars(self) and not self._codegen._engine.is_symbol_defined(name):
            parsed(self)
        return address_of(self, name)

    def begin(context: Any) -> Any:
        _import_without_scipy()
        return _WhenAsked(functools.partial(compile_runtime, context))

    _library._unserialize = classmethod(from_cache)
    _library._get_module_for_linking = parsed
    _library.get_pointer_to_function = found
    _runtime.compile_nrt_functions = begin


@functools.cache
def _nothing() -> bytes:
    """An LLVM module with nothing in it."""
    return bytes(llvm.parse_assembly("").as_bitcode())


class _WhenAsked:
    """Stands for a library that is compiled when anything of it is asked for."""

    def __init__(self, compile_it: Any) -> None:
        self._compile = functools.cache(compile_it)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile(), name)


def _import_without_scipy() -> None:
    """numba's functions of arrays; those of linear algebra import scipy when they are compiled."""
    linear: Any = import_module("numba.np.linalg")
    look = linear.ensure_blas
    if "scipy" in sys.modules:  # where there is one, numba has imported its root
        linear.ensure_blas = lambda: None
    try:
        arrays: Any = import_module("numba.np.arraymath")
        arrays.ensure_blas = look
    finally:
        linear.ensure_blas = look
