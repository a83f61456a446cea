"""A process that compiles kernels into the cache, calling none.

Standard input brings groups of calls, one a line of JSON; every call that is done or cannot be is
answered by a line. The end of standard input is the end of the process.

A kernel that another one calls becomes part of its code. Besides, numba makes of it what Python
could call, and saves that: a quarter of the time, for what is never called. Here it does not.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import numba.core.caching
import numba.core.cpu
import numba.core.dispatcher

from lexshard.kernels.ahead.calls import Call, is_compiled

_depth = 0  # of the compilation under way: 1 for what was asked for, more for what it calls


def compile_callees_into_callers_only() -> None:
    """From now on what is compiled because another kernel calls it cannot be called from Python."""
    # As far as types go, these are anything: they are numba's own business.
    dispatcher: Any = numba.core.dispatcher
    cpu: Any = numba.core.cpu
    caching: Any = numba.core.caching
    compile_one, flags_of = dispatcher.Dispatcher.compile, dispatcher._FunctionCompiler
    make_callable, save = cpu.CPUContext.get_executable, caching.Cache.save_overload

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
        return make_callable(self, library, description, environment)

    def save_where_asked(self: Any, signature: Any, data: Any) -> None:
        if _depth <= 1:
            save(self, signature, data)

    dispatcher.Dispatcher.compile = compile_counted
    flags_of._customize_flags = without_wrappers
    cpu.CPUContext.get_executable = callable_where_asked
    caching.Cache.save_overload = save_where_asked


def compile_call(call: Call) -> None:
    """Into the cache, unless it is there."""
    if is_compiled(call):
        return
    function, types = call.dispatcher, call.types
    function.overloads.pop(types, None)  # it may have been made for another kernel
    function.compile(types)


def main() -> None:
    compile_callees_into_callers_only()
    for line in sys.stdin:
        for each in json.loads(line):
            try:
                compile_call(Call(**each))
            except Exception as error:
                # Whoever calls it will compile it, or tell better than this process can.
                print(f"lexshard: {each['function']} was not compiled: {error}", file=sys.stderr)
            print("done", flush=True)


if __name__ == "__main__":
    main()
