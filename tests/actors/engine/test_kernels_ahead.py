"""What a served model calls is compiled before it is called, and only what it calls."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.start import kernels_ahead
from lexshard.actors.engine.start.kernels_ahead import (
    BODY,
    COMPACT_TYPE,
    TOLD_EVERY,
    calls_of,
    compile_kernels,
)
from lexshard.actors.messages import VerifyMode
from lexshard.kernels.ahead import GUESSING, ONE_CALL, SEVERAL_STEPS, WHOLE_ROWS
from lexshard.kernels.ahead.calls import Call
from lexshard.kernels.linear import compact
from tests.support.paths import DEMO, DEMO_DRAFT, ROOT

PACKING = ("_read", "_survey", "_write")
POSTPONED = (GUESSING, ONE_CALL, SEVERAL_STEPS, WHOLE_ROWS)
# Of a body: the demo's, whose draft model has a tenth of that.
LARGE = 2**22

START = f"""
import sys
from lexshard.kernels.linear import compact
compact.FROM_BYTES = int(sys.argv[1])
from numba.core.dispatcher import Dispatcher
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.start.kernels_ahead import calls_of, compile_kernels
from lexshard.kernels.ahead import compile_beside, is_postponed, postpone
from lexshard.kernels.ahead.calls import Call

configuration = EngineConfiguration(model={str(DEMO)!r}, draft={str(DEMO_DRAFT)!r})
compile_kernels(configuration, print)
postpone({{"all": [Call(each, []) for each in {POSTPONED!r}]}})
engine = Engine(configuration)
# A first start, until the rest is compiled.
engine.warm_up()
compile_beside(calls_of(configuration))
assert compile_kernels(configuration, print) == {{}}
assert not any(map(is_postponed, {POSTPONED!r}))
engine.warm_up()
functions = {{
    value
    for name, module in list(sys.modules.items()) if name.startswith("lexshard.kernels.")
    for value in vars(module).values() if isinstance(value, Dispatcher)
}}
print("loaded", sum(len(each.stats.cache_hits) for each in functions))
print("compiled", [
    (each.py_func.__module__, each.py_func.__qualname__, str(signature))
    for each in functions for signature in each.stats.cache_misses
])
"""


@pytest.mark.parametrize("large", [compact.FROM_BYTES, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_a_start_compiles_nothing_once_what_is_listed_was_compiled_ahead(large: int) -> None:
    """Where it fails, `kernels/ahead/served.json` lacks the calls that it names. Also where weights
    are compact."""
    told = subprocess.run(
        [sys.executable, "-c", START, str(large)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert told[-1] == "compiled []"
    assert int(told[-2].removeprefix("loaded ")) > 20


def folders(configuration: EngineConfiguration) -> set[str]:
    return {call.folder for calls in calls_of(configuration).values() for call in calls}


def test_without_a_draft_model_nothing_is_compiled_for_one() -> None:
    alone = folders(EngineConfiguration(model=str(DEMO), device="cpu"))
    paired = folders(EngineConfiguration(model=str(DEMO), draft=str(DEMO_DRAFT), device="cpu"))
    assert paired - alone == {"draft"}
    by_lookup = EngineConfiguration(model=str(DEMO), draft="ngram", device="cpu")
    assert folders(by_lookup) == alone


def test_without_ranks_nothing_is_compiled_for_them() -> None:
    alone = folders(EngineConfiguration(model=str(DEMO), device="cpu"))
    shared = EngineConfiguration(model=str(DEMO), tensor_parallel=2, device="cpu")
    assert folders(shared) ^ alone == {"parallel", "steps"}


def test_compact_weights_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the body; a draft model's stay as they are, and so do ranks'."""
    monkeypatch.setattr(compact, "FROM_BYTES", LARGE)
    monkeypatch.setattr(compact, "_ENOUGH_VECTORS", True)
    monkeypatch.setattr(compact, "sums_as_matrices", lambda: False)

    def bodies(**settings: Any) -> list[tuple[str, bool]]:
        calls = calls_of(EngineConfiguration(model=str(DEMO), device="cpu", **settings))
        return sorted(
            (call.function, COMPACT_TYPE in call.arguments)
            for call in itertools.chain.from_iterable(calls.values())
            if call.function in (BODY, SEVERAL_STEPS) or ".compact:" in call.function
        )

    packing = [(f"lexshard.kernels.linear.compact:{name}", False) for name in PACKING]
    own = [*packing, (BODY, True), (SEVERAL_STEPS, True)]
    assert bodies() == own
    assert bodies(draft=str(DEMO_DRAFT)) == sorted([*own, (BODY, False)])
    assert bodies(tensor_parallel=2) == [(BODY, False)]
    monkeypatch.undo()
    assert bodies() == [(BODY, False), (SEVERAL_STEPS, False)]


def test_nothing_is_compiled_for_a_gpu_for_other_weights_or_for_none(tmp_path: Path) -> None:
    assert folders(EngineConfiguration(model=str(DEMO), device="cuda")) == set()
    assert folders(EngineConfiguration(model=str(DEMO), dtype="float32", device="cpu")) == set()
    assert folders(EngineConfiguration(model=str(tmp_path), device="cpu")) == set()
    # Of none that is to be bfloat16 nothing is known but that: loading it says what is missing.
    assert folders(EngineConfiguration(model=str(tmp_path), dtype="bfloat16", device="cpu"))


def test_a_processor_that_lacks_an_instruction_set_gets_no_code_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels_ahead, "has_feature", lambda name: False)
    calls = calls_of(EngineConfiguration(model=str(DEMO), device="cpu"))
    assert "signed_bytes" not in json.dumps(
        [each.function for all in calls.values() for each in all]
    )


@pytest.mark.parametrize("verify", ["same-token", "greedy", "same-distribution", "sigmoid"])
def test_what_drafts_need_is_compiled_later_unless_tokens_depend_on_them(
    verify: VerifyMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = EngineConfiguration(
        model=str(DEMO), draft=str(DEMO_DRAFT), device="cpu", verify=verify
    )
    compiled: list[str] = []
    monkeypatch.setattr(kernels_ahead, "missing_calls", lambda groups: groups)
    monkeypatch.setattr(
        kernels_ahead,
        "compile_ahead",
        lambda groups, *_: compiled.extend(
            call.function for calls in groups.values() for call in calls
        ),
    )
    later = compile_kernels(configuration, lambda phase: None)
    expected = {WHOLE_ROWS, ONE_CALL, SEVERAL_STEPS}
    expected |= {GUESSING} if verify in ("same-token", "greedy") else set()
    assert {call.function for calls in later.values() for call in calls} == expected
    assert expected.isdisjoint(compiled)
    assert len(compiled) + len(expected) == sum(map(len, calls_of(configuration).values()))


def test_samplers_and_hot_vocabularies_are_warm_from_the_first_token_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They compile whole rows themselves, or choose by how long these take."""
    monkeypatch.setattr(kernels_ahead, "missing_calls", lambda groups: groups)
    monkeypatch.setattr(kernels_ahead, "compile_ahead", lambda *_: None)
    for options in ({"samplers": 1}, {"hot_vocabulary": "hot.json"}):
        configuration = EngineConfiguration(model=str(DEMO), device="cpu", **options)
        later = compile_kernels(configuration, lambda phase: None)
        functions = {call.function for calls in later.values() for call in calls}
        assert WHOLE_ROWS not in functions
        assert SEVERAL_STEPS in functions or "samplers" in options


def test_a_log_gets_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"all": [Call("a.b:c", [])] * 4}
    seconds = 0.0

    def compile_ahead(given: object, cores: int, told: object) -> None:
        nonlocal seconds
        for _ in range(4):
            seconds += 0.6 * TOLD_EVERY
            told(1)  # type: ignore[operator]

    monkeypatch.setattr(kernels_ahead.time, "monotonic", lambda: seconds)
    monkeypatch.setattr(kernels_ahead, "missing_calls", lambda given: groups)
    monkeypatch.setattr(kernels_ahead, "compile_ahead", compile_ahead)
    told: list[str] = []
    assert compile_kernels(EngineConfiguration(model=str(DEMO), device="cpu"), told.append) == {}
    assert told == [f"compiling kernels, {done} of 4, once on this machine" for done in (0, 2, 4)]
