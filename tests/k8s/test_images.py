"""What the images are made of: the same steps in a bare Debian root, and their scripts."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.support.bare_debian import PACKAGES, command, install, make, missing, serve, stop
from tests.support.manifests import K8S
from tests.support.mock_engine import MockEngine, Script, ids
from tests.support.mock_server import listening
from tests.support.paths import ROOT
from tests.support.real_server import healthy, wait

IMAGES = K8S / "images"
DOCKERFILES = sorted(IMAGES.glob("Dockerfile.*"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_what_its_build_copies_and_its_pods_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    # Everything that is copied is in the build's context.
    passed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(f"{each}/") for each in passed), source
    assert set(PACKAGES) <= set(re.findall(r"\w+", text))
    assert "USER 1000:1000" in text
    assert "HEALTHCHECK" in text


def test_drain_waits_for_open_requests_and_not_for_ever() -> None:
    with listening() as address:
        assert (
            subprocess.run(["sh", IMAGES / "drain.sh", "5", address], check=False).returncode == 0
        )

    body = {"prompt": "a", "stream": True, "max_tokens": 500}
    slow = MockEngine(script=lambda _: Script([ids("a")], hangs=True))
    with listening(slow) as address:
        with httpx.stream("POST", f"{address}/v1/completions", json=body) as response:
            chunks = response.iter_raw()  # which closes the stream when it is forgotten
            next(chunks)
            started = time.monotonic()
            done = subprocess.run(
                ["sh", IMAGES / "drain.sh", "2", address],
                capture_output=True,
                text=True,
                check=False,
            )
            assert time.monotonic() - started >= 2
            assert "1 requests are still open" in done.stderr
        assert (
            subprocess.run(["sh", IMAGES / "drain.sh", "20", address], check=False).returncode == 0
        )


def test_drain_does_not_wait_for_a_server_that_is_gone() -> None:
    done = subprocess.run(["sh", IMAGES / "drain.sh", "9", "http://127.0.0.1:9"], check=False)
    assert done.returncode == 0


def test_the_install_script_says_what_is_wrong(tmp_path: Path) -> None:
    script = IMAGES / "install.sh"
    for words, told in (
        ([], "usage"),
        (["rocm", ROOT, tmp_path], "'rocm' is neither cpu nor cuda"),
        (["cpu", tmp_path, tmp_path], "no checkout of lexshard"),
    ):
        done = subprocess.run(["sh", script, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert told in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_bare_debian_becomes_a_server(tmp_path: Path) -> None:
    why_not = missing()
    if why_not:
        pytest.skip(why_not)
    root, log = tmp_path / "root", tmp_path / "log"
    make(root)
    print(f"install.sh took {install(root):.0f} s")
    torch = "import torch; assert torch.version.cuda is None, torch.__version__"
    subprocess.run(command(root, "python", "-c", torch), check=True, cwd="/")
    process, port = serve(root, log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait(lambda: healthy(url) or process.poll() is not None, 900, "the server")
        assert process.poll() is None, log.read_text()
        body = {"model": "lexshard-demo", "prompt": "Once upon a time", "max_tokens": 8}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert list((root / "cache").rglob("*.nbi")), "kernels were compiled elsewhere"
    finally:
        code = stop(process)
        print(log.read_text()[-3000:])
    assert code == 0
