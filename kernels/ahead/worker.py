"""A process that compiles kernels into the cache, calling none.

Standard input brings calls, one a line of JSON; every one that is done or cannot be is answered by
a line. The end of standard input is the end of the process, whatever it is doing. Its
argument is how much it lets others go first (`nice`).

A kernel that another one calls becomes part of its code. Besides, numba optimizes it alone, makes
machine code of it that Python could call, and saves that: half of the time, for what is never
called. Here it does not; what it becomes part of is optimized, once.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import queue
import sys
import threading
from typing import Any

import numba.core.caching
import numba.core.codegen
import numba.core.cpu
import numba.core.dispatcher

from lexshard.kernels.ahead.calls import Call, is_compiled

NUMBAS_OWN = frozenset({"nrt", "multi3"})  # libraries whose functions code finds by their names

_depth = 0  # of the compilation under way: 1 for what was asked for, more for what it calls


def compile_callees_into_callers_only() -> None:
    """From now on what is compiled because another kernel calls it cannot be called from Python."""
    # As far as types go, these are anything: they are numba's own business.
    dispatcher: Any = numba.core.dispatcher
    cpu: Any = numba.core.cpu
    caching: Any = numba.core.caching
    library_class: Any = numba.core.codegen.JITCodeLibrary
    compile_one, flags_of = dispatcher.Dispatcher.compile, dispatcher._FunctionCompiler
    make_callable, save = cpu.CPUContext.get_executable, caching.Cache.save_overload
    generate_code = library_class._finalize_final_module
    optimize = library_class._optimize_final_module

    @functools.wraps(compile_one)
    def compile_counted(self: Any, signature: Any) -> Any:
        global _depth
        _depth += 1
        try:
            return compile_one(self, signature)
        finally:
            _depth -= 1

    def without_wrappers(self: Any, flags: Any) -> Any:
        if _depth > 1:
            flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags

    def callable_where_asked(self: Any, library: Any, description: Any, environment: Any) -> Any:
        if _depth > 1:
            return [].append  # numba tells functions apart by such an object; it is never called
        library._ensure_finalized()
        generate_code(library)
        return make_callable(self, library, description, environment)

    def optimize_where_asked(self: Any) -> None:
        if _depth <= 1 or self.name in NUMBAS_OWN:
            optimize(self)

    def ready_to_be_linked(self: Any) -> None:
        has_code = getattr(self, "_compiled_object", None) is not None  # it is from the cache
        if has_code or self.name in NUMBAS_OWN:
            generate_code(self)
        else:
            self._finalize_dynamic_globals()
            self._verify_declare_only_symbols()
            self._finalized = True

    def save_where_asked(self: Any, signature: Any, data: Any) -> None:
        if _depth <= 1:
            save(self, signature, data)

    dispatcher.Dispatcher.compile = compile_counted
    flags_of._customize_flags = without_wrappers
    cpu.CPUContext.get_executable = callable_where_asked
    library_class._optimize_final_module = optimize_where_asked
    library_class._finalize_final_module = ready_to_be_linked
    caching.Cache.save_overload = save_where_asked


def compile_call(call: Call) -> None:
    """Into the cache, unless it is there."""
    if is_compiled(call):
        return
    function, types = call.dispatcher, call.types
    function.overloads.pop(types, None)  # it may have been made for another kernel
    function.compile(types)


def _read(calls: queue.SimpleQueue[str]) -> None:
    """Every line to ``calls``; when they end, the other side has all answers, or is no more."""
    for line in sys.stdin:
        calls.put(line)
    os._exit(0)


def main() -> None:
    os.nice(int(sys.argv[1]))
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(calls,), daemon=True).start()
    compile_callees_into_callers_only()
    # A compiler keeps most of what it makes: looking for garbage often is a tenth of the time.
    gc.set_threshold(1_000_000, 50, 100)
    while True:
        call = Call(**json.loads(calls.get()))
        try:
            compile_call(call)
        except Exception as error:
            # Whoever calls it will compile it, or tell better than this process can.
            print(f"lexshard: {call.function} was not compiled: {error}", file=sys.stderr)
        print("done", flush=True)


if __name__ == "__main__":
    main()
