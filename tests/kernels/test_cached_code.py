"""A kernel that comes from the cache brings its machine code, and all else when it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

PROGRAM = """
import sys

import llvmlite.binding
import numba
import numpy as np
from numba.core.codegen import JITCodeLibrary

made = []
parse, look = llvmlite.binding.parse_bitcode, JITCodeLibrary._object_compiled_hook


def parse_noted(bitcode, *others):
    made.extend(["module"] * (b"doubled" in bitcode))
    return parse(bitcode, *others)


llvmlite.binding.parse_bitcode = parse_noted
JITCodeLibrary._object_compiled_hook = classmethod(
    lambda cls, module, code: (made.append(module.name), look.__func__(cls, module, code))[1]
)

from lexshard.kernels.cached_code import load_code_alone

load_code_alone()


@numba.njit(cache=True)
def doubled(values):
    return values * 2.0


@numba.njit
def caller(values):
    other = np.ones(values.shape[0])
    return np.dot(doubled(values), other)


ones = np.ones(3)
print(*doubled(ones), "of", *made, "scipy.linalg" in sys.modules)
del made[:]
print(caller(ones), "of", *made, "scipy.linalg" in sys.modules)
"""


def test_a_kernel_from_the_cache_is_machine_code_until_another_is_compiled(tmp_path: Path) -> None:
    """One that calls it, takes memory, and multiplies matrices: of numba's own runtime and of
    scipy, too."""
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def told() -> list[str]:
        command = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    compiled, linked = told()
    assert {"doubled", "nrt"} < set(compiled.split())
    loaded, linked_from_cache = told()
    assert loaded == "2.0 2.0 2.0 of global_codegen_module False"
    assert {"module", "nrt"} < set(linked_from_cache.split())
    for each in (linked, linked_from_cache):
        assert (each.split()[0], each.split()[-1]) == ("6.0", "True")
