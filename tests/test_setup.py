"""What users install, from the public index alone: it installs into nothing, and serves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from lexshard.cluster.ports import free_port
from tests.support.checkout import copy_checkout
from tests.support.real_server import healthy, wait

# What a machine has at hand must not decide: neither its configuration nor wheels on its disk.
OF_THIS_MACHINE = ("UV_", "PIP_", "PYTHONPATH", "VIRTUAL_ENV", "LEXSHARD_")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_empty_environment_becomes_a_server_that_answers(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_MACHINE)
    }
    environment |= {"LEXSHARD_HOME": str(tmp_path / "home"), "UV_CACHE_DIR": str(tmp_path / "uv")}
    source = copy_checkout(tmp_path / "lexshard")

    subprocess.run([sys.executable, "-m", "venv", source / ".venv"], check=True)
    python = source / ".venv" / "bin" / "python"
    install = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--python", python]
    constraints = ["--constraint", source / "constraints.txt"]
    subprocess.run([*install, *constraints, source], env=environment, check=True)
    # The certified head and its draws are there already, with three packages.
    core = [python, "-P", source / "tests" / "support" / "core_alone.py"]
    subprocess.run(core, env=environment, cwd=tmp_path, check=True)
    subprocess.run([*install, *constraints, f"{source}[serve]"], env=environment, check=True)
    shutil.rmtree(tmp_path / "uv")
    for name in ("actors", "cluster", "kernels", "loadtest", "serve_app"):
        shutil.rmtree(source / name)  # what was installed is whole

    url = f"http://127.0.0.1:{(port := free_port())}"
    model = source / "models" / "lexshard-demo"
    command = [
        source / ".venv" / "bin" / "lexshard",
        "serve",
        "--model",
        model,
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        wait(lambda: healthy(url) or server.poll() is not None, 900, "a server")
        asked = {"model": "lexshard-demo", "prompt": "Once upon a time", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
