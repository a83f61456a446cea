"""The wheel: every module and every file that a module reads, under names that are ours alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.checkout import copy_checkout, tracked_files
from tests.support.paths import ROOT

FOLDERS = ("actors", "cluster", "kernels", "loadtest", "serve_app")
UNINSTALLED = """
import sys
sys.path[:] = [path for path in sys.path if "finder" not in path]
sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in repr(each)]
"""
PROGRAM = f"""{UNINSTALLED}
sys.path.insert(0, sys.argv[1])
from lexshard.serve_app import cli
from lexshard.kernels.ahead.calls import read_calls
assert cli.__file__.startswith(sys.argv[1]), cli.__file__
assert read_calls()
sys.exit(cli.main(["config", "schema"]))
"""


def test_it_holds_every_module_and_its_files_and_needs_no_checkout(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", tmp_path]
    subprocess.run([*build, copy_checkout(tmp_path / "source")], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        needs = archive.read(metadata).decode().splitlines()
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    assert {name.split("/")[0] for name in names} == {"lexshard"}
    wanted = {f"lexshard/{each}" for each in tracked_files(*FOLDERS) if not each.endswith(".yaml")}
    assert wanted - names == set()  # what `ray up` reads stays in the checkout
    alone = [line for line in needs if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert {re.split(r"[ ><=]", line)[1] for line in alone} == {"numba", "numpy", "torch"}
    told = subprocess.check_output(
        [sys.executable, "-P", "-c", PROGRAM, tmp_path / "installed"], cwd=tmp_path, text=True
    )
    assert told.startswith("{")


def test_certified_draws_take_numpy_numba_and_torch_alone() -> None:
    script = ROOT / "tests" / "support" / "core_alone.py"
    told = subprocess.check_output([sys.executable, "-P", script], text=True)
    assert told == "certified draws are those of every logit\n"


def test_a_command_says_what_to_install() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.support.core_alone import CoreAlone
sys.meta_path.insert(0, CoreAlone())
from lexshard.serve_app.cli import main
print(main(["--version"]), main(["bogus"]), main(["serve", "--help"]), main(["replay", "a"]))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 2 2 2"
    for line in done.stderr.splitlines()[1:]:
        assert re.fullmatch(
            r"lexshard (serve|replay): needs \w+, which `pip install '\.\[serve\]'` in a checkout "
            "brings",
            line,
        )


def test_gpus_are_measured_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    program = f"""{UNINSTALLED}
import importlib.util, runpy
assert importlib.util.find_spec("lexshard") is None
runpy.run_module("loadtest.gpu", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-c", program, "--out", tmp_path, "--seconds", "0"]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=without_gpu, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
