"""One text, whichever way the server is started: `lexshard serve`, `serve run`, or as a guest of a
cluster that `ray start --head` has made."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from lexshard.cluster.ports import free_port
from tests.support.paths import DEMO, ROOT, SERVE_EXAMPLE
from tests.support.ray_head import command, ray_environment, ray_head
from tests.support.real_server import healthy, running_server, wait

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time there was a little girl who"
FLAGS = ("--head", "dense", "--max-model-len", "128")


def texts(url: str) -> list[str]:
    found = []
    for seed in range(3):
        body = {"prompt": PROMPT, "max_tokens": 40, "seed": seed, "temperature": 0.8}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["text"])
    return found


@contextmanager
def served_by_serve_run(folder: Path, port: int) -> Iterator[str]:
    """The example, with this model and port."""
    data = yaml.safe_load(SERVE_EXAMPLE.read_text(encoding="utf-8"))
    data["http_options"]["port"] = port
    changes = {"model": str(DEMO), "head": "dense", "max_model_len": 128}
    data["applications"][0]["args"] |= changes
    path, log = folder / "serve.yaml", folder / "log"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command("serve"), "run", str(path), "--address", "local"],
            cwd=ROOT,
            env=ray_environment(),
            stdout=output,
            stderr=output,
            # Ray's command has no handler of its own, and what a shell runs in the background
            # ignores the signal that ends it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: healthy(url) or process.poll() is not None, 300, "serve run")
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            print(log.read_text()[-3000:])
            process.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with running_server(tmp_path_factory.mktemp("own"), *FLAGS) as server:
        return texts(server.url)


def test_serve_run_says_what_lexshard_serve_says(expected: list[str], tmp_path: Path) -> None:
    with served_by_serve_run(tmp_path, free_port()) as url:
        assert texts(url) == expected


def test_a_guest_says_the_same_and_leaves_the_cluster_as_it_was(
    expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = ray_environment()
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with ray_head(tmp_path, environment) as address:
        with running_server(tmp_path, *FLAGS, "--address", address, backend="ray") as server:
            assert texts(server.url) == expected
        assert server.process.returncode == 0, server.log.read_text()
        look = (
            "import ray; from ray._private.state import actors; "
            f"ray.init(address='{address}', log_to_driver=False); "
            "print([each['Name'] for each in actors().values() if each['State'] != 'DEAD'], "
            "ray.get(ray.remote(lambda: 'alive').remote()))"
        )
        found = subprocess.run(
            [command("python"), "-c", look],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.stdout.strip().endswith("[] alive"), found.stdout + found.stderr
