"""Several processes that compile at the same time leave a cache that gives each its own code."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pickle import UnpicklingError
from types import FunctionType
from unittest.mock import Mock

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

from lexshard import kernels
from lexshard.kernels import compile_cache, masks
from lexshard.kernels.compile_cache import compiled_folder
from lexshard.kernels.home import VARIABLE as HOME
from tests.support.paths import ROOT

PROCESSES, KEYS = 4, 40

SAVE = f"""
import sys, time
from lexshard.kernels.compile_cache import compiled_folder
from numba.core.caching import IndexDataCacheFile
process, start = int(sys.argv[1]), float(sys.argv[2])
cache = IndexDataCacheFile(str(compiled_folder()), "kernel", "stamp")
time.sleep(max(0.0, start - time.time()))
for number in range({KEYS}):
    cache.save((process, number), ["code of", process, number])
"""


@pytest.mark.slow
def test_whoever_saves_at_the_same_time_every_key_has_its_own_code(tmp_path: Path) -> None:
    start = str(time.time() + 4.0)  # when all have imported what they need
    folder = tmp_path / compiled_folder().name
    folder.mkdir()
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    savers = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(process), start], cwd=ROOT, env=environment
        )
        for process in range(PROCESSES)
    ]
    assert [each.wait() for each in savers] == [0] * PROCESSES
    cache = IndexDataCacheFile(str(folder), "kernel", "stamp")
    for process in range(PROCESSES):
        for number in range(KEYS):
            assert cache.load((process, number)) == ["code of", process, number]


WHERE = """
from lexshard.kernels.draw import cpu
from numba.core.dispatcher import Dispatcher
found = [each for each in vars(cpu).values() if isinstance(each, Dispatcher)]
cache = found[0]._cache
print(cache.cache_path, cache._impl.locator.get_source_stamp())
"""


@pytest.mark.parametrize("named", [None, "NUMBA_CACHE_DIR"])
def test_checkouts_with_the_same_kernels_share_what_is_compiled(
    tmp_path: Path, named: str | None
) -> None:
    """Wherever they lie; one whose kernels differ has a folder of its own, whatever it changed:
    also in a folder that images of several releases share."""

    def where(root: Path) -> str:
        (root / "names").mkdir(exist_ok=True)
        (root / "names" / "lexshard").symlink_to(root)
        environment = {**os.environ, HOME: str(tmp_path / "home")}
        environment["PYTHONPATH"] = str(root / "names")
        environment.pop("NUMBA_CACHE_DIR", None)
        if named is not None:
            environment[named] = str(tmp_path / "home" / "compiled")
        command = [sys.executable, "-P", "-c", WHERE]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout

    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        shutil.copytree(ROOT / "kernels", each / "kernels")
        (each / "__init__.py").touch()
    there = where(first)
    assert str(tmp_path / "home") in there
    shutil.rmtree(first / "names")
    (second / "kernels/rows/triton_kernel.py").write_text("import torch\nimport triton\n")
    assert there == where(first) == where(second)
    shutil.rmtree(second / "names")
    with (second / "kernels/pool.py").open("a") as file:
        file.write("# another\n")
    assert where(second) != there


COMPILED = """
import os
import numpy as np
from lexshard.kernels import masks
masks.count_of(np.ones(2, np.uint64))
print(masks.count_of._cache.cache_path, os.environ["TRITON_CACHE_DIR"])
"""


def test_a_home_that_cannot_be_written_keeps_no_kernel_beside_the_sources(tmp_path: Path) -> None:
    """There numba goes by the file of a function alone: after an upgrade yesterday's kernel would
    be taken. Where that cannot be written either, nothing could be imported."""
    checkout, temporary = tmp_path / "names" / "lexshard", tmp_path / "temporary"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels", checkout / "kernels", ignore=ignored)
    (checkout / "__init__.py").touch()
    temporary.mkdir()
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    environment |= {"PYTHONPATH": str(checkout.parent), "TMPDIR": str(temporary), HOME: "/proc/no"}
    told = []
    for cache in ("", __file__):
        command = [sys.executable, "-P", "-c", COMPILED]
        caches = {"NUMBA_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment | caches, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert all(Path(each).is_relative_to(temporary) for each in done.stdout.split())
        told.append("set LEXSHARD_HOME to a folder that can be written" in done.stderr)
    assert told == [True, False]  # once
    assert not list(checkout.rglob("*.nb[ic]"))


def test_nothing_that_numba_compiles_depends_on_modules_of_triton() -> None:
    """They are not in the name of the folder."""
    texts = {each: each.read_text() for each in (ROOT / "kernels").rglob("*.py")}
    without = {
        ".".join(each.relative_to(ROOT).with_suffix("").parts)
        for each, text in texts.items()
        if "\nimport triton" in text
    }
    assert without
    for text in texts.values():
        if "njit" in text and "\nimport triton" not in text:
            assert not [each for each in without if f"lexshard.{each} import" in text]


@pytest.mark.vectors
def test_no_two_compiled_functions_share_a_name() -> None:
    """Symbols of the same name are linked as the same code, whichever process compiled it; the
    numbers that numba adds are of one process."""
    named: dict[tuple[str, str], FunctionType] = {}
    for found in pkgutil.walk_packages(kernels.__path__, "lexshard.kernels."):
        if found.name.rpartition(".")[2] in ("triton_kernel", "gpu") or ".gpu." in found.name:
            continue
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, Dispatcher):
                function = value.py_func
                name = (function.__module__, function.__qualname__)
                assert named.setdefault(name, function) is function, name
                # What a function closes over is in its key, and a compiled one is another in every
                # process: it would never be found again.
                cells = [cell.cell_contents for cell in function.__closure__ or ()]
                assert not any(isinstance(each, Dispatcher) for each in cells), name
    assert len(named) > 50


@pytest.mark.parametrize("error", [OSError(28, "No space left"), UnpicklingError("truncated")])
def test_a_cache_that_cannot_be_read_or_written_stops_no_engine(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kernel, said = masks.count_of, Mock()
    monkeypatch.setattr(compile_cache, "_warn_once", said)
    for name in ("_load_overload", "_save_overload"):
        monkeypatch.setattr(kernel._cache, name, Mock(side_effect=error))
    assert kernel._cache.load_overload(None, kernel.targetctx) is None
    kernel._cache.save_overload(None, None)
    assert [call.args[-1] for call in said.mock_calls] == 2 * [error.args[-1]]
