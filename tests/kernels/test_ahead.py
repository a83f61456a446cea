"""What is compiled ahead, by processes that call nothing, is what Python then calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba import types
from numba.core.caching import IndexDataCacheFile

from lexshard.kernels.ahead import _Work, compile_ahead
from lexshard.kernels.ahead.calls import Call, missing_calls, read_calls, text_of_type, type_of_text
from lexshard.kernels.noise.cpu import _row, gumbel_row
from lexshard.kernels.search.types import Needs
from tests.support.paths import ROOT

# One kernel and one that calls it, which take a second to compile.
COUNT = Call("lexshard.kernels.masks:count_of", ["uint64[1C]"])
CALLER = Call("lexshard.kernels.masks:ids_of", ["uint64[1C]", "int64"])

AHEAD = """
import json, sys
from lexshard.kernels.ahead import _Work, compile_ahead
from lexshard.kernels.ahead.calls import Call, missing_calls

def told(count):
    if count:
        print("told", count)

groups = {name: [Call(**each) for each in calls] for name, calls in json.loads(sys.argv[1]).items()}
compile_ahead(missing_calls(groups), 2, told)
print("missing", sum(map(len, missing_calls(groups).values())))
"""

CALLED = """
import numpy as np
from lexshard.kernels.masks import count_of, ids_of, mask_words

words = mask_words([3, 64, 70, 199], 200)
results = [count_of(words), *ids_of(words, 200)]
print(len(count_of.stats.cache_misses) + len(ids_of.stats.cache_misses))
print(*results)
"""


def in_a_process(program: str, cache: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def as_json(**groups: list[Call]) -> str:
    return json.dumps(
        {
            name: [{"function": each.function, "arguments": each.arguments} for each in calls]
            for name, calls in groups.items()
        }
    )


@pytest.mark.slow
def test_what_was_compiled_ahead_is_loaded_and_computes_the_same(tmp_path: Path) -> None:
    """Both a kernel and one that calls it: each of a group of its own, and both of one."""
    apart, together, nothing = tmp_path / "apart", tmp_path / "together", tmp_path / "nothing"
    told = in_a_process(AHEAD, apart, as_json(one=[COUNT], other=[CALLER]))
    assert told.split() == ["told", "1", "told", "1", "missing", "0"]
    told = in_a_process(AHEAD, together, as_json(all=[CALLER, COUNT]))
    assert told.split() == ["told", "1", "told", "1", "missing", "0"]
    misses, *expected = in_a_process(CALLED, nothing).split()
    assert int(misses) > 0
    for cache in (apart, together):
        misses, *results = in_a_process(CALLED, cache).split()
        assert int(misses) == 0
        assert results == expected == ["4", "3", "64", "70", "199"]


BESIDE = """
import json, sys
from lexshard.kernels.ahead import compile_beside, is_postponed, postpone
from lexshard.kernels.ahead.calls import Call

call = Call(**json.loads(sys.argv[1]))
odd = Call("lexshard.kernels.masks:ids_of", ["letters[2C]"])
postpone({"all": [call], "odd": [odd]})
waiting = is_postponed(call.function), is_postponed(odd.function)
compile_beside({"all": [call]})
print(len(call.dispatcher.signatures), len(call.dispatcher.stats.cache_hits))
print(*waiting, is_postponed(call.function), is_postponed(odd.function))
"""


@pytest.mark.slow
def test_what_is_compiled_beside_is_at_hand_afterwards(tmp_path: Path) -> None:
    """What was not compiled stays postponed."""
    call = json.dumps({"function": COUNT.function, "arguments": COUNT.arguments})
    told = in_a_process(BESIDE, tmp_path, call).split()
    assert told == ["1", "1", "True", "True", "False", "True"]


def test_a_process_that_compiles_ends_with_the_one_that_asked(tmp_path: Path) -> None:
    """In the midst of what it compiles."""
    command = [sys.executable, "-m", "lexshard.kernels.ahead.worker", "0"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(1000 * (json.dumps(json.loads(as_json(all=[CALLER]))["all"][0]) + "\n"))
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_what_the_cache_has_is_not_compiled_again(tmp_path: Path) -> None:
    in_a_process(AHEAD, tmp_path, as_json(all=[COUNT]))
    assert in_a_process(AHEAD, tmp_path, as_json(all=[COUNT])).split() == ["missing", "0"]


@pytest.mark.slow
def test_a_call_that_cannot_be_compiled_keeps_no_other_from_it(
    tmp_path: Path,
) -> None:
    wrong = Call(COUNT.function, ["float32[2C]"])
    told = in_a_process(AHEAD, tmp_path, as_json(all=[wrong, COUNT]))
    assert told.split() == ["told", "1", "told", "1", "missing", "1"]


def test_who_has_compiled_a_group_helps_with_what_others_come_to_last() -> None:
    one, other = [Call(name, []) for name in "abc"], [Call(name, []) for name in "de"]
    work = _Work({"one": one, "other": other})
    first, second = work.calls(), work.calls()
    assert [next(each).function for each in (first, second, second, second)] == ["a", "d", "e", "c"]
    assert [call.function for call in first] == ["b"]
    assert list(second) == list(work.calls()) == []


def test_functions_that_are_no_more_are_left_out() -> None:
    gone = [
        Call("lexshard.kernels.linear.cpu:gone", []),
        Call("lexshard.kernels.gone:multiply", []),
    ]
    odd = Call(COUNT.function, ["letters[2C]"])
    assert missing_calls({"all": [*gone, odd]}) == {}


@pytest.mark.parametrize("torn", ["kernel.nbi", "kernel.1.nbc"])
def test_what_a_loss_of_power_has_torn_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str
) -> None:
    cache, target = COUNT.dispatcher._cache, COUNT.dispatcher.targetctx.codegen()
    files = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    monkeypatch.setattr(cache, "_cache_file", files)
    files.save(cache._index_key(COUNT.types, target), ["code"])
    assert missing_calls({"all": [COUNT]}) == {}
    files.save("another", ["code"])
    (tmp_path / torn).write_bytes(b"")
    assert missing_calls({"all": [COUNT]}) == {"all": [COUNT]}
    assert ("another" in files._load_index()) == (torn != "kernel.nbi")
    (tmp_path / torn).unlink()
    assert missing_calls({"all": [COUNT]}) == {"all": [COUNT]}
    assert ("another" in files._load_index()) == (torn != "kernel.nbi")


def test_processes_that_die_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    compile_ahead({"one": [COUNT], "other": [CALLER]}, 2, told.append)
    assert not any(told)


def test_every_call_that_is_known_names_a_kernel_and_types() -> None:
    for calls in read_calls().values():
        for call in calls:
            assert call.dispatcher.py_func.__qualname__ == call.function.partition(":")[2]
            assert list(map(text_of_type, call.types)) == call.arguments


def test_noise_of_rows_is_known_as_the_index_calls_it() -> None:
    """An engine that builds the index would compile it itself."""
    gumbel_row(1, 2, 100)
    known = [call for calls in read_calls().values() for call in calls]
    named = {call.types for call in known if call.function == "lexshard.kernels.noise.cpu:_row"}
    assert set(_row.signatures) <= named


def test_text_of_types_leads_back_to_them() -> None:
    field = types.Array(types.float64, 1, "C")
    kinds = [
        types.int64,
        types.boolean,
        types.Array(types.uint16, 3, "C"),
        types.Array(types.float32, 2, "A"),
        types.UniTuple(types.int64, 2),
        types.Tuple((types.int64, types.boolean)),
        types.NamedUniTuple(field, len(Needs._fields), Needs),
    ]
    assert [type_of_text(text_of_type(kind)) for kind in kinds] == kinds


def test_types_that_no_kernel_gets_have_no_text() -> None:
    for kind in (types.Array(types.float64, 1, "C", readonly=True), types.unicode_type):
        with pytest.raises(ValueError, match="text"):
            text_of_type(kind)
