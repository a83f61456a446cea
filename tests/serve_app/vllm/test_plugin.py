"""What vLLM's loading of the plugin changes, and that a version it does not know is left alone."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from lexshard.serve_app.vllm.plugin import register, version_refusal
from tests.support.vllm_engines import MISSING, PYTHON


@pytest.fixture
def unknown_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of next year, none of whose modules may be asked for."""
    module = ModuleType("vllm")
    module.__version__ = "0.99.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_vllm_finds_the_plugin() -> None:
    [found] = entry_points(group="vllm.general_plugins", name="lexshard")
    assert found.load() is register


@pytest.mark.usefixtures("unknown_vllm")
def test_an_unknown_version_is_left_alone_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,lexshard")
    with caplog.at_level(logging.ERROR, "vllm.lexshard"):
        register()
    [line] = [each.getMessage() for each in caplog.records]
    assert "0.99.1" in line
    assert "as without it" in line
    assert "0.99.1" in str(version_refusal())


@pytest.mark.usefixtures("unknown_vllm")
@pytest.mark.parametrize("named", [None, "", "other"])
def test_who_does_not_name_it_gets_vllm_as_it_is(
    named: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if named is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    register()
    assert caplog.records == []


PROGRAM = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.custom_op import op_registry_oot
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First
from lexshard.serve_app.vllm.plugin import register
register()  # once more changes nothing
print(op_registry_oot["LogitsProcessor"].__name__, hasattr(First._sample, "__wrapped__"))
print(hasattr(First._sample.__wrapped__, "__wrapped__"), hasattr(Second.sample, "__wrapped__"))
print("ray" in sys.modules, any(each.startswith("lexshard.kernels") for each in sys.modules))
"""


def test_loading_it_changes_vllm_once_and_compiles_nothing() -> None:
    if not PYTHON.exists():
        pytest.skip(MISSING)
    told = subprocess.run(
        [str(PYTHON), "-P", "-c", PROGRAM],
        env={"VLLM_PLUGINS": "lexshard", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()[-3:]
    assert told == ["CertifiedLogitsProcessor True", "False True", "False False"]


COMPILED = """
import sys
if {ours}:
    import lexshard.serve_app.vllm.head
else:
    import llvmlite.binding
found = 0
for name in [each for each in sys.modules if each.startswith("llvmlite")]:
    for value in list(vars(sys.modules[name]).values()):
        if hasattr(value, "__dict__"):  # as vLLM looks for its kernels
            found += not hasattr(vars(value), "get")
print(found)
"""


@pytest.mark.parametrize("ours", [True, False])
def test_vllm_can_look_into_all_that_the_head_loads(ours: bool) -> None:
    """It does where it makes a second engine in a process; what makes it fail is another's."""
    told = subprocess.run(
        [sys.executable, "-c", COMPILED.format(ours=ours)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert (int(told[-1]) == 0) == ours
