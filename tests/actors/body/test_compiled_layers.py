"""Compiled layers compute what the layers that are written do, or are not used.

On a GPU their machine code is torch's own; here they are traced as there, and compiled for a CPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.capture import compute_each_time
from lexshard.actors.body.gpu.checked import compile_checked
from lexshard.actors.body.gpu.compiled_layers import KEYS
from lexshard.actors.body.gpu.graphed_body import GraphedBody
from lexshard.actors.body.self_test import pack_batch, plain_forward, run_mixed
from lexshard.kernels.attention import allocate_cache
from tests.support.paths import ROOT
from tests.support.quick import quick
from tests.support.recorded_steps import TABLES, TOKENS, largest_difference
from tests.support.tiny_models import save_tiny


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(family: str, folder: Path, **changes: Any) -> Any:
    save_tiny(family, folder, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def body_of(family: str, folder: Path, **changes: Any) -> GeneralBody:
    """As on a GPU: torch's own functions."""
    body = GeneralBody(model_of(family, folder, **changes), invariant=False)
    body.allocate_cache(8)
    return body


@pytest.mark.parametrize(
    "family", quick(["llama", "qwen3", "gemma2", "phi3", "olmo2"], "llama", "phi3")
)
def test_a_layer_compiles_as_a_whole_and_computes_the_same(family: str, tmp_path: Path) -> None:
    """Chunks, decoding, several sequences, and then another cache."""
    body = body_of(family, tmp_path)
    expected = run_mixed(body, TOKENS)
    body.compile_layers("aot_eager")
    for _ in range(2):
        assert largest_difference(run_mixed(body, TOKENS), expected) < 1e-5
    assert body.layers == "layers compiled"
    body.interpret_layers("to compare")
    assert largest_difference(run_mixed(body, TOKENS), expected) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma2", 2)])
def test_layers_of_one_kind_share_their_code(family: str, kinds: int, tmp_path: Path) -> None:
    """Layers with a window and layers without are two kinds; steps of one row are another shape
    than steps of several, of which all sizes are one."""
    body = body_of(family, tmp_path, num_hidden_layers=6, layer_types=None)
    body.forward(pack_batch(TOKENS, [(0, 0, 5)], TABLES))
    counter = CompileCounterWithBackend("aot_eager")
    body.compile_layers(counter)  # type: ignore[arg-type]
    for rows in (5, 1, 7, 12, 9, 1, 14):
        body.forward(pack_batch(TOKENS, [(0, 0, rows)], TABLES))
    assert counter.frame_count == 3 * kinds  # five rows, one row, any number of rows


@pytest.mark.slow
def test_steps_of_fixed_shapes_take_compiled_layers(tmp_path: Path) -> None:
    body = body_of("gemma2", tmp_path)
    expected = run_mixed(body, TOKENS)
    body.compile_layers("aot_eager")
    graphed = GraphedBody(body, lambda: compute_each_time)
    assert largest_difference(run_mixed(graphed, TOKENS), expected) < 1e-5
    assert graphed.description.startswith("steps of up to 512 rows in CUDA graphs, layers compiled")


def test_layers_that_do_not_compile_are_computed_as_they_are_written(tmp_path: Path) -> None:
    """Their caches are let go of, too."""
    model = model_of("llama", tmp_path)
    expected = plain_forward(model)
    body = GeneralBody(model, invariant=False)
    before = run_mixed(body, expected.token_ids)

    def failing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    compile_checked(body, expected, 1e-4, failing)  # type: ignore[arg-type]
    assert not body.compiled
    assert "no compiler here" in body.layers
    assert not any(hasattr(module, KEYS) for module in body._decoder.modules())
    assert largest_difference(run_mixed(body, expected.token_ids), before) == 0.0


@pytest.mark.slow
def test_layers_that_compute_something_else_are_not_taken(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    expected = plain_forward(model)
    body = GeneralBody(model, invariant=False)
    before = run_mixed(body, expected.token_ids)

    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *values: tuple(1.5 * each for each in graph(*values))

    compile_checked(body, expected, 1e-4, wrong)  # type: ignore[arg-type]
    assert not body.compiled
    assert body.layers.startswith("layers not compiled (")
    assert largest_difference(run_mixed(body, expected.token_ids), before) == 0.0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_machine_code_computes_the_same_and_copies_no_cache(tmp_path: Path) -> None:
    """What torch generates writes keys and values where they belong: a copy of the caches would
    show as the memory of one of them."""
    model = model_of("gemma2", tmp_path)
    expected = plain_forward(model)
    body = GeneralBody(model, invariant=False)
    run_mixed(body, expected.token_ids)
    compile_checked(body, expected, 1e-4)
    assert body.layers == "layers compiled"
    body.allocate_cache(4096)
    assert body._caches is not None
    cache_bytes = body._caches[0][0].nbytes
    batch = pack_batch(TOKENS, [(0, 0, 5)], TABLES)
    body.forward(batch)
    with torch.profiler.profile(profile_memory=True) as profile:
        body.forward(batch)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    assert 0 < largest < cache_bytes / 2


def test_a_new_cache_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Both at once would not fit on a GPU that has filled what it has with one."""
    body = body_of("gemma2", tmp_path)
    run_mixed(body, TOKENS)
    body.compile_layers("aot_eager")
    assert body._caches is not None
    before = [weakref.ref(cache) for pair in body._caches for cache in pair]
    allocated: list[int] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        allocated.append(sum(each() is not None for each in before))
        return allocate_cache(*arguments, **options)

    with patch("lexshard.actors.body.general.allocate_cache", counting):
        body.allocate_cache(8)
    assert allocated == [0] * body.num_layers


# It looks into parts of torch that have no interface.
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="torch 2.13 alone")
def test_a_layer_is_at_most_twelve_launches() -> None:
    """Llama 3.1 8B's shape, one sequence and 64: four products, attention, the joining of its
    splits, the cache write, two norms, the gate, the rotations and a sum."""
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.layer_launches"]
    told = subprocess.check_output(command, cwd=ROOT, text=True)
    counted = {int(rows): int(count) for rows, count in re.findall(r"(\d+) rows: (\d+)", told)}
    assert counted.keys() == {1, 64}
    assert max(counted.values()) <= 12, told
