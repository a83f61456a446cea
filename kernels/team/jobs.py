"""One compiled function in all threads of a team: `run`, and what its parts say to each other.

A job is a compiled function ``job(rank, size, *arguments)`` without a result. Its arguments stay
where the caller has them; the threads get the address of the code and of the arguments, so nothing
of Python is between them. What a job must share it gets as arrays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lexshard.kernels.team.atomics import add, address_of, load, pause, store
from lexshard.kernels.team.clock import let_others, now

# Where each word is. Two lines apart: processors fetch lines by twos, and a word that one thread
# writes must not take another's away.
_APART = 16
(
    POSTED,  # how many jobs there were, times `MOST_MEMBERS`, plus how many take part in the last
    FUNCTION,
    ARGUMENTS,
    LEFT,  # how many of the others that take part are not done
    FAILED,
    BUSY,  # whether a job runs
    ARRIVED,  # at the place where all wait for all
    ROUND,  # how often all have been there
    ASLEEP,
    MUTEX,
    WOKEN,  # what sleeping threads wait for
    LOST,  # nanoseconds that threads waited for others longer than a moment
    SHARED,  # nanoseconds that jobs took, times the threads beside the caller's
) = range(0, 13 * _APART, _APART)
WORDS = 13 * _APART
MOST_MEMBERS = 1 << 10
# So many looks at what another thread is about to do; then its core may be needed for just that.
_LOOKS = 1000
# The most of the time of those beside the caller that may be lost: then it is better off alone. And
# nanoseconds lost in one step, of several that a call takes, before the others are its own.
MOST_LOST, LOST_AT_ONCE = 0.15, 1_000_000
# So many looks at what is posted before a thread sleeps, which takes between 0.2 and 1 ms: a step
# comes sooner after the one before, and waking a thread takes up to 0.15 ms.
_PATIENCE = 2000

_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.int64))
_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.int64))
_sleep = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_wake_all = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.int64))
_make_mutex = types.ExternalFunction("pthread_mutex_init", types.int32(types.int64, types.int64))
_make_condition = types.ExternalFunction("pthread_cond_init", types.int32(types.int64, types.int64))

_WORD = ir.IntType(64)
_JOB = ir.FunctionType(_WORD, [_WORD, _WORD, _WORD])  # arguments, rank, size: whether it failed


@njit(nogil=True, cache=True)
def prepare(team):  # type: ignore[no-untyped-def]
    """Makes ``team`` [WORDS] int64 zeros a team without members."""
    _make_mutex(address_of(team, MUTEX), 0)
    _make_condition(address_of(team, WOKEN), 0)


@njit(nogil=True, cache=True)
def wait_for_all(team, size):  # type: ignore[no-untyped-def]
    """Returns when all ``size`` threads of a job have come here. What any of them wrote before,
    all of them read after. Where a part has failed, nothing is waited for: the job has failed."""
    if size == 1:
        return
    number = load(team, ROUND)
    if add(team, ARRIVED, 1) == size - 1:
        store(team, ARRIVED, 0)
        store(team, ROUND, number + 1)
        return
    _wait_while(team, ROUND, number, True)


@njit(nogil=True, cache=True)
def _wait_while(team, place, value, may_fail):  # type: ignore[no-untyped-def]
    for _ in range(_LOOKS):
        if load(team, place) != value:
            return
        pause()
    began = now()
    while load(team, place) == value and not (may_fail and load(team, FAILED) > 0):
        let_others()
    add(team, LOST, now() - began)


@njit(nogil=True, cache=True)
def is_kept_waiting(team):  # type: ignore[no-untyped-def]
    """Whether too much of the team's time has been lost lately for another job of many."""
    lost = load(team, LOST)
    return lost >= LOST_AT_ONCE and lost > MOST_LOST * load(team, SHARED)


@njit(nogil=True, cache=True)
def _post(team, word):  # type: ignore[no-untyped-def]
    store(team, POSTED, word)
    if load(team, ASLEEP) > 0:
        _lock(address_of(team, MUTEX))
        _wake_all(address_of(team, WOKEN))
        _unlock(address_of(team, MUTEX))


@njit(nogil=True, cache=True)
def rouse(team):  # type: ignore[no-untyped-def]
    """Members wake up: there will be a job in no time."""
    if add(team, BUSY, 1) == 0:
        _post(team, (load(team, POSTED) // MOST_MEMBERS + 1) * MOST_MEMBERS)
    add(team, BUSY, -1)


@njit(nogil=True, cache=True)
def dismiss(team):  # type: ignore[no-untyped-def]
    """Members return from `serve`. A job that a daemon thread runs meanwhile comes to its end
    first; those that come later run in their callers' threads alone."""
    while add(team, BUSY, 1) > 0:
        add(team, BUSY, -1)
        let_others()
    _post(team, -1)


@njit(nogil=True, cache=True)
def _next_word(team, last):  # type: ignore[no-untyped-def]
    """What is posted after ``last``."""
    for looks in range(_PATIENCE):
        if load(team, POSTED) != last:
            return load(team, POSTED)
        if looks < _LOOKS:
            pause()
        else:
            let_others()
    _lock(address_of(team, MUTEX))
    add(team, ASLEEP, 1)
    while load(team, POSTED) == last:
        _sleep(address_of(team, WOKEN), address_of(team, MUTEX))
    add(team, ASLEEP, -1)
    _unlock(address_of(team, MUTEX))
    return load(team, POSTED)


@njit(nogil=True, cache=True)
def serve(team, rank):  # type: ignore[no-untyped-def]
    """A member's life, from before the first job on until `dismiss`. Ranks begin with 1: that of
    the caller of a job is 0."""
    last = 0
    while last >= 0:
        last = _next_word(team, last)
        size = last % MOST_MEMBERS
        if last > 0 and rank < size:
            failed = _call(load(team, FUNCTION), load(team, ARGUMENTS), rank, size)
            add(team, FAILED, failed)
            add(team, LEFT, -1)


@intrinsic
def _call(typing_context: Any, function: Any, arguments: Any, rank: Any, size: Any) -> Any:
    """One thread's part of the job at this address."""

    def code_generator(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        job = builder.inttoptr(values[0], _JOB.as_pointer())
        return builder.call(job, values[1:])

    word = types.int64
    return word(word, word, word, word), code_generator


def _run_parts(team, size, function, arguments):  # type: ignore[no-untyped-def]
    alone = size == 1 or add(team, BUSY, 1) > 0
    if alone:
        failed = _call(function, arguments, 0, 1)
    else:
        store(team, FUNCTION, function)
        store(team, ARGUMENTS, arguments)
        store(team, LEFT, size - 1)
        store(team, FAILED, 0)
        store(team, ARRIVED, 0)
        began = now()
        _post(team, (load(team, POSTED) // MOST_MEMBERS + 1) * MOST_MEMBERS + size)
        add(team, FAILED, _call(function, arguments, 0, size))
        left = load(team, LEFT)
        while left > 0:
            _wait_while(team, LEFT, left, False)
            left = load(team, LEFT)
        add(team, SHARED, (now() - began) * (size - 1))
        failed = load(team, FAILED)
    if size > 1:
        add(team, BUSY, -1)
    if failed:
        raise RuntimeError("a part of a job that several threads share has failed")


def _uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value for one thread. References to arrays are not counted, which the caller's are:
    threads that count the same ones take the counter from each other at every slice."""
    if isinstance(kind, types.BaseTuple):
        parts = [
            _uncounted(context, builder, each, builder.extract_value(value, place))
            for place, each in enumerate(kind)
        ]
        return context.make_tuple(builder, kind, parts)
    if not isinstance(kind, types.Array):
        return value
    array = context.make_array(kind)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    return array._getvalue()


@intrinsic
def run(typing_context: Any, team: Any, size: Any, job: Any, arguments: Any) -> Any:
    """``run(team, size, job, arguments)`` in nopython code: ``job(rank, size, *arguments)`` in
    ``size`` threads, of which this is the one of rank 0; returns when all are done.

    ``job`` is a compiled function without a result, ``arguments`` a tuple. A job that is run from
    within another, or beside one, runs in this thread alone.
    """
    taken = (types.int64, types.int64, *arguments.types)
    of_job = typing_context.resolve_function_type(job, taken, {})

    def code_generator(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        compiled = job.dispatcher.overloads[of_job.args]
        context.add_linking_libs((compiled.library,))
        packed = cgutils.alloca_once_value(builder, values[3])
        code = ir.Function(
            builder.module, _JOB, builder.module.get_unique_name(f"part.{of_job.args}")
        )
        code.linkage = "internal"
        inner = ir.IRBuilder(code.append_basic_block("entry"))
        every = inner.load(inner.inttoptr(code.args[0], packed.type))
        own = [
            _uncounted(context, inner, kind, inner.extract_value(every, place))
            for place, kind in enumerate(arguments.types)
        ]
        status, _ = context.call_internal_no_propagate(
            inner, compiled.fndesc, of_job, [*code.args[1:], *own]
        )
        inner.ret(inner.zext(status.is_error, _WORD))
        word = types.int64
        context.compile_internal(
            builder,
            _run_parts,
            types.void(team, word, word, word),
            [values[0], values[1], builder.ptrtoint(code, _WORD), builder.ptrtoint(packed, _WORD)],
        )
        return context.get_dummy_value()

    return types.void(team, types.int64, job, arguments), code_generator
