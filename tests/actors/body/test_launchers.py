"""A GPU whose kernels cannot be launched: what is missing is told, and no model is blamed."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lexshard.actors.body.errors import BuildToolsError
from lexshard.actors.body.loading import check_before_weights, load
from tests.support.paths import DEMO

triton = pytest.importorskip("triton")

# As Triton's own for a GPU begins; that one asks for the driver's library, too.
SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
"""


class Driver:
    """Triton's, for a GPU that is not there: compiled by Triton itself, as it would be."""

    @property
    def active(self) -> ModuleType:
        module: ModuleType = triton.runtime.build.compile_module_from_src(SOURCE, "launcher")
        return module


@pytest.fixture(autouse=True)
def _a_gpu_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)


def of_a_model() -> None:
    load(DEMO)


def before_weights() -> None:
    check_before_weights(DEMO, 1, {"BF16": 1})


@pytest.mark.parametrize("check", [of_a_model, before_weights])
def test_no_compiler_is_told_before_a_model_is_read(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildToolsError, match=r"there is no C compiler: install gcc and libc6-dev"):
        check()
    monkeypatch.setenv("CC", "cc-of-yesterday")
    with pytest.raises(BuildToolsError, match=r"\(cc-of-yesterday, which CC names, is none\)"):
        check()


def test_no_headers_are_told_before_a_model_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = sysconfig.get_paths
    nowhere = {"include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda *words, **more: paths() | nowhere)
    with pytest.raises(BuildToolsError, match=rf"Python.h, which is not in {tmp_path}: install"):
        load(DEMO)


def test_another_reason_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> ModuleType:
        raise AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up")

    monkeypatch.setattr(triton.runtime.build, "compile_module_from_src", build)
    with pytest.raises(BuildToolsError, match=r"libcuda.so cannot found! Please make sure GPU"):
        load(DEMO)


def test_what_was_compiled_before_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Driver().active.__name__ == "launcher"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 1))
    with pytest.raises(ValueError, match="the weights need"):
        check_before_weights(DEMO, 14_000_000, {"BF16": 7_000_000})
