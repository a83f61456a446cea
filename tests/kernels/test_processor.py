"""`LEXSHARD_CPU`: one machine compiles as one without AVX-512 does, and computes the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llvmlite.binding
import numpy as np
import pytest

from lexshard.cluster.config_sources import PROCESSORS, ConfigError, environment_values
from lexshard.kernels.processor import (
    CHOICES,
    VARIABLE,
    choose_processor,
    multiplies_matrices,
)
from tests.support.paths import ROOT
from tests.support.processor_digest import ENGINES

OURS = (VARIABLE, "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
FEATURES = llvmlite.binding.get_host_cpu_features()
needs_avx2 = pytest.mark.skipif(not FEATURES.get("avx2"), reason="needs a processor with AVX2")


def held_where_they_differ(test: Callable[..., None]) -> Callable[..., None]:
    """Without AVX-512 both are the same instructions in another order: not worth minutes of
    compiling before everything that lands."""
    return test if FEATURES.get("avx512f") else pytest.mark.slow(test)


def run(code: str, *arguments: str, **variables: str) -> str:
    """What a process of its own prints, which compiles for this machine unless told otherwise."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, "PYTHONPATH": str(ROOT), **variables},
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


TOLD = """
import os, lexshard.kernels
from numba.core.registry import cpu_target
from lexshard.kernels.attention import by_tiles as attention
from lexshard.kernels.linear import cpu
from lexshard.kernels.linear.tile import MULTIPLIES_PAIRS
from lexshard.kernels.processor import has_feature
from lexshard.kernels.screen import bits, tile, vnni
name, features = cpu_target.target_context.codegen().magic_tuple()[1:]
assert (name, features) == (os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"])
print(name, has_feature("avx2"), has_feature("avx512f"))
print(cpu.WIDE, MULTIPLIES_PAIRS, attention.WIDE, tile.LANES, bits.WIDTH, vnni.AVAILABLE)
"""


@needs_avx2
def test_kernels_are_compiled_as_without_avx512() -> None:
    assert run(TOLD, LEXSHARD_CPU="avx2") == "haswell True False\nFalse False 2 16 32 False\n"


KERNEL = """
from numba import njit

@njit(cache=True)
def twice(number):
    return number + number
"""
COMPILED = """
import sys, lexshard.kernels
sys.path.insert(0, sys.argv[1])
from kernel import twice
assert twice(3.0) == 6.0
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()))
"""


@pytest.mark.slow
@needs_avx2
def test_neither_finds_what_was_compiled_for_the_other(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for found in ("0 1\n", "1 0\n"):
        assert run(COMPILED, str(tmp_path), **cache) == found
        assert run(COMPILED, str(tmp_path), LEXSHARD_CPU="avx2", **cache) == found


def libraries_without_avx512() -> dict[str, str]:
    """What keeps torch and numpy from it, too: they choose by variables of their own."""
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    wide = [name for name in found if name.startswith(("AVX512", "X86_V4"))]
    return {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": " ".join(wide),
    }


DIGEST = """
import json, sys
from pathlib import Path
from tests.support.processor_digest import digests
print("\\n" + json.dumps(digests(Path(sys.argv[1]))))
"""


@needs_avx2
@held_where_they_differ
@pytest.mark.timeout(1800)  # where nothing has been compiled yet, for either
def test_bodies_heads_and_draws_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Of the demo: hidden states of 1 to 97 rows, screens, and what engines with every kind of head
    tell clients who want every kind of draw, with drafts of either kind and without."""
    narrow = {VARIABLE: "avx2", **libraries_without_avx512()}
    here_without_matrices = {VARIABLE: "avx512"} if multiplies_matrices() else {}
    with ThreadPoolExecutor(2) as beside:
        running = [
            beside.submit(run, DIGEST, str(tmp_path / name), **variables)
            for name, variables in (("here", here_without_matrices), ("narrow", narrow))
        ]
    here, narrower = (json.loads(each.result().splitlines()[-1]) for each in running)
    assert set(here) == {"body", "screens", *ENGINES}
    assert narrower == here


SUMS = """
import hashlib, sys
import numpy as np, torch
from lexshard.kernels.attention import allocate_cache, paged_attention, write_cache
from lexshard.kernels.linear import linear, pack
from lexshard.kernels.processor import instructions
numbers = np.random.default_rng(1).integers(-(2**24), 2**24, (2, 70, 100)).astype(np.float32)
x, weight = torch.from_numpy(numbers)
found = linear(x, pack(weight.bfloat16(), arithmetic="bfloat16"))
caches = allocate_cache(5, 1, 64, dtype=torch.bfloat16)
heads = torch.from_numpy(numbers.reshape(-1)[: 70 * 64].reshape(70, 1, 64)) / 2**24
write_cache(heads, heads.flip(0), torch.arange(70), *caches)
table, rows = torch.arange(5, dtype=torch.int32)[None], torch.zeros(70, dtype=torch.int32)
places = torch.arange(70, dtype=torch.int32)
attended = paged_attention(heads.repeat(1, 3, 1), *caches, table, rows, places, 0.1, 50, 0.0)
digests = [hashlib.sha256(each.numpy().tobytes()).hexdigest()[:16] for each in (found, attended)]
print(instructions() == "AMX", *digests)
"""


@needs_avx2
@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("avx2", "False 4125224a304bd69d 775973a074bfbd4d"),
        ("avx512", "False 4125224a304bd69d 775973a074bfbd4d"),
        ("amx", "True e49e40d2de5bdabb 886ed6ad2377ea2d"),
    ],
)
def test_products_of_bfloat16_have_the_bits_of_the_processor_that_is_named(
    processor: str, expected: str
) -> None:
    """On every machine: all add as one does that has no AMX, or all as one that has it."""
    if processor == "avx512" and not FEATURES.get("avx512bw"):
        pytest.skip("needs a processor with AVX-512")
    assert run(SUMS, LEXSHARD_CPU=processor) == f"{expected}\n"


LARGE = """
import hashlib
import torch
from lexshard.kernels.linear import cpu, linear, pack
from lexshard.kernels.prefetch import NEAREST
torch.manual_seed(1)
x, weight = torch.randn(17, 2048), torch.randn(272, 2048)
assert 2 * weight.numel() > cpu.FAR_BYTES
of = (pack(weight), pack(weight.bfloat16()), pack(weight.bfloat16(), arithmetic="bfloat16"))
sums = [linear(x[:rows], each) for each in of for rows in (*range(1, 10), 17)]
print(NEAREST, hashlib.sha256(b"".join(each.numpy().tobytes() for each in sums)).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(not FEATURES.get("avx512f"), reason="needs a processor with AVX-512")
def test_tiles_of_large_products_differ_by_processor_and_their_bits_do_not() -> None:
    variables = {"NUMBA_CPU_FEATURES": FEATURES.flatten().replace("+amx", "-amx")}
    told = [run(LARGE, NUMBA_CPU_NAME=name, **variables) for name in ("znver4", "skylake-avx512")]
    (asks_second, sums), (asks_first, others) = map(str.split, told)
    assert (asks_second, asks_first) == ("2", "1")
    assert sums == others


def test_another_name_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx3")
    known = "it can be avx2, avx512, amx, vectors or unset"
    with pytest.raises(ValueError, match=f"^LEXSHARD_CPU is 'avx3': {known}$"):
        choose_processor()
    with pytest.raises(ConfigError, match=f"LEXSHARD_CPU: {known}, not 'avx3'"):
        environment_values({VARIABLE: "avx3"})


def test_vectors_are_those_that_there_are() -> None:
    asked = "from lexshard.kernels.processor import has_feature, sums_as_matrices as matrices\n"
    asked += "print(matrices(), *(has_feature(each) for each in ('amx-bf16', 'avx512f', 'avx2')))"
    told = run(asked, LEXSHARD_CPU="vectors").split()
    wide = [str(bool(FEATURES.get(name))) for name in ("avx512f", "avx2")]
    assert told == ["False", "False", *wide]


def test_it_is_no_option_of_the_server_and_no_unknown_variable() -> None:
    assert set(PROCESSORS) == {"", *CHOICES}
    for name in PROCESSORS:
        assert environment_values({VARIABLE: name}) == {}
