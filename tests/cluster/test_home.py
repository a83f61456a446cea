"""`LEXSHARD_HOME`: one folder for what lexshard writes by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lexshard.actors.index.automatic import default_index_path
from lexshard.actors.index.metadata import Weights
from lexshard.cluster.config_sources import PROCESS_VARIABLES, environment_values
from lexshard.kernels.home import home_folder, writable
from tests.support.paths import ROOT


def test_it_is_the_named_folder_else_one_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEXSHARD_HOME", str(tmp_path))
    assert home_folder() == tmp_path
    monkeypatch.delenv("LEXSHARD_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home_folder() == tmp_path / "lexshard"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home_folder() == Path.home() / ".cache" / "lexshard"


@pytest.mark.parametrize(
    ("given", "numba", "triton"),
    [
        ({"LEXSHARD_HOME": "home"}, "home/kernels-", "home/triton"),
        ({"LEXSHARD_HOME": "home", "TRITON_CACHE_DIR": "own"}, "home/kernels-", "own"),
        ({"LEXSHARD_HOME": "home", "NUMBA_CACHE_DIR": "own"}, "own/kernels-", "home/triton"),
        ({"XDG_CACHE_HOME": "home"}, "home/lexshard/kernels-", ""),
    ],
)
def test_kernels_are_compiled_into_it(
    given: dict[str, str], numba: str, triton: str, tmp_path: Path
) -> None:
    told = "import os, lexshard.kernels.compile_cache as c; print(c.compiled_folder())"
    told += "; print(os.environ.get('TRITON_CACHE_DIR', ''))"
    ours = ("LEXSHARD_", "NUMBA_", "TRITON_", "XDG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {name: str(tmp_path / value) for name, value in given.items()}
    done = subprocess.run(
        [sys.executable, "-c", told],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    compiled, cached = done.stdout.split("\n")[:2]
    assert compiled.startswith(str(tmp_path / numba))
    assert cached == (str(tmp_path / triton) if triton else "")


def test_an_index_is_there_where_the_models_folder_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEXSHARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    weights = Weights(rows=8, columns=4, dtype="float32", hash="ab" * 32, bias=False)
    assert default_index_path(tmp_path, weights) == tmp_path / "home" / ("ab" * 16 + ".lexshard")


def test_where_neither_can_be_written_an_index_is_in_a_folder_of_this_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose file system is read-only but for /tmp."""
    monkeypatch.setenv("LEXSHARD_HOME", "/proc/no/home")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    weights = Weights(rows=8, columns=4, dtype="float32", hash="ab" * 32, bias=False)
    path = default_index_path("/proc/no", weights)
    [own] = tmp_path.iterdir()
    assert path.parent.is_dir()
    assert path.is_relative_to(own)
    assert own.stat().st_mode & 0o777 == 0o700
    assert "/proc/no/home cannot be written" in caplog.text
    writable.cache_clear()
    own.chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone: set LEXSHARD_HOME"):
        default_index_path("/proc/no", weights)
    writable.cache_clear()


def test_a_user_without_a_home_has_a_place_that_stands_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LEXSHARD_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError: the user is in no list
    assert home_folder() == Path("/lexshard")


def test_it_is_no_option_of_the_server_and_no_unknown_variable() -> None:
    assert environment_values(dict.fromkeys(PROCESS_VARIABLES - {"LEXSHARD_CPU"}, "x")) == {}
