"""What the images are made of: the same steps in a bare Debian root, and their scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.bare_debian import (
    CACHE,
    CHECKOUT,
    PACKAGES,
    USER,
    command,
    install,
    make,
    missing,
    serve,
    stop,
)
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
    copied = text[text.index("COPY") :]
    assert all(f"/{script.name}" in copied for script in IMAGES.glob("*.sh"))
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(f"{each}/") for each in passed), source
    assert set(PACKAGES) <= set(re.findall(r"\w+", text))
    assert "USER 1000:1000" in text
    assert re.search(r'HEALTHCHECK[^\n]*\n *CMD \["wget", "--no-proxy"', text)


def stand_in(path: Path, *lines: str) -> None:
    """A program of that name, which notes its arguments in ``calls`` beside it."""
    noting = f'echo "{path.name} $*" >> "{path.parent / "calls"}"'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", noting, *lines]) + "\n")
    path.chmod(0o700)


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
                env={**os.environ, "http_proxy": "http://127.0.0.1:9"},  # it is for others
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


def test_drain_without_time_ends_at_once() -> None:
    """As where Ray took all that a pod had."""
    done = subprocess.run(["sh", IMAGES / "drain.sh", "0"], check=False)
    assert done.returncode == 0


def left(folder: Path, *, accepted: bool, replicas: int) -> subprocess.CompletedProcess[str]:
    """leave.sh on a node that Ray lets go, or not, with a replica that lives for so many looks."""
    stand_in(folder / "ray", f"exit {0 if accepted else 1}")
    looks = f'[ "$(grep -c pgrep "{folder / "calls"}")" -le {replicas} ]'
    stand_in(folder / "pgrep", looks)
    stand_in(folder / "sleep")
    stand_in(folder / "wget", 'echo "lexshard_admitted_sequences 0.0"')
    return subprocess.run(
        ["sh", IMAGES / "leave.sh", "5"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_pod_that_ends_waits_for_its_own_replicas_alone(tmp_path: Path) -> None:
    """/metrics tells of all there are: a pod would wait for the streams of others."""
    done = left(tmp_path / "node", accepted=True, replicas=3)
    calls = (tmp_path / "node" / "calls").read_text().splitlines()
    assert done.returncode == 0
    assert calls[0].startswith("ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION ")
    assert "--deadline-remaining-seconds 5" in calls[0]
    assert calls[1:] == ["pgrep -f ^ray::ServeReplica", "sleep 1"] * 3 + [
        "pgrep -f ^ray::ServeReplica"
    ]
    done = left(tmp_path / "stuck", accepted=True, replicas=99)
    assert (done.returncode, done.stderr) == (0, "leave.sh: a replica still has streams\n")
    done = left(tmp_path / "refused", accepted=False, replicas=99)
    assert done.returncode == 0
    assert "waiting for the requests of all replicas" in done.stderr
    assert "wget" in (tmp_path / "refused" / "calls").read_text()


@pytest.mark.slow
def test_no_stream_is_cut_and_no_request_fails_where_a_pod_ends_beside_others(
    tmp_path: Path,
) -> None:
    """Requests go on coming, to both; the pod that ends has those it had, and no others."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.leaving_pod", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["replicas"] == 2  # of four
    assert (told["code"], told["said"]) == (0, "")
    assert set(told["streams"]) == {"whole"}
    assert told["failures"] == []
    assert told["answered"] > 6
    assert told["seconds"] < 60  # of 100


def test_scripts_of_the_images_can_be_run() -> None:
    """They are copied with their mode."""
    for script in IMAGES.glob("*.sh"):
        assert os.access(script, os.X_OK), script


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


def installed(
    folder: Path,
    variant: str,
    *,
    headers: bool,
    script: Path = IMAGES / "install.sh",
    **environment: str,
) -> tuple[str, str]:
    """What install.sh asks the distribution and pip for, on a machine with Python and a compiler,
    and Python's ``headers`` or not."""
    programs, bin_folder = folder / "programs", folder / "environment" / "bin"
    there = folder / "Python.h"
    folder.mkdir(exist_ok=True)
    if headers:
        there.touch()
    stand_in(programs / "apt-get", f'[ "$1" = update ] || touch "{there}"')
    stand_in(programs / "python3", f'case "$2" in *Python.h*) test -e "{there}" ;; esac')
    stand_in(programs / "cc")
    stand_in(programs / "id", "echo 0")
    for name in ("python", "lexshard"):
        stand_in(bin_folder / name)
    wanted = ["sh", str(script), variant, str(ROOT), str(folder / "environment")]
    path = f"{programs}:{os.environ['PATH']}"
    without = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX"}
    subprocess.run(wanted, env={**without, "PATH": path, **environment}, check=True)
    calls = (programs / "calls").read_text().splitlines()
    asked = " ".join(call for call in calls if call.startswith("apt-get install"))
    return asked, (bin_folder / "calls").read_text()


def test_cuda_gets_what_triton_compiles_its_launchers_with(tmp_path: Path) -> None:
    """On the nodes of `ray up`, too, which run the same script."""
    asked, pip = installed(tmp_path / "bare", "cuda", headers=False)
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(asked.split())
    assert "[gpu-cuda13]" in pip
    asked, _ = installed(tmp_path / "complete", "cuda", headers=True)
    assert asked == ""
    asked, _ = installed(tmp_path / "cpu", "cpu", headers=False)
    assert asked == ""


def test_what_is_installed_is_up_to_date_until_it_would_be_another(tmp_path: Path) -> None:
    """From another index, too, or by another script."""
    again = partial(installed, tmp_path / "there", "cpu", headers=False)
    _, first = again()
    assert again()[1] == first
    _, other = again(TORCH_INDEX="https://mirror.test")
    assert "mirror.test" in other.removeprefix(first)
    script = tmp_path / "install.sh"
    script.write_text((IMAGES / "install.sh").read_text() + "# another\n")
    assert again(script=script, TORCH_INDEX="https://mirror.test")[1] != other


def test_a_cpu_takes_torch_without_cuda_unless_told_otherwise(tmp_path: Path) -> None:
    _, pip = installed(tmp_path / "default", "cpu", headers=False)
    assert "[serve]" in pip  # without it there is no server
    assert re.search(r"--extra-index-url https://\S+/whl/cpu torch==\S+\+cpu ", pip)
    _, pip = installed(tmp_path / "other", "cpu", headers=False, TORCH_INDEX="https://mirror.test")
    assert "--extra-index-url https://mirror.test torch==" in pip
    _, pip = installed(tmp_path / "none", "cpu", headers=False, TORCH_INDEX="")
    assert "--extra-index-url" not in pip
    # An empty default of a build's argument would be heard as an index that was chosen.
    dockerfile = (IMAGES / "Dockerfile.cpu").read_text(encoding="utf-8")
    assert re.search(r"^ARG TORCH_INDEX$", dockerfile, re.MULTILINE)


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_bare_debian_becomes_what_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The CUDA image's steps, without a GPU: torch and CuPy of one CUDA, kernels compiled to its
    machine code by what the script has installed, NCCL found."""
    why_not = missing()
    if os.environ.get("TESTS_INSTALL_CUDA") != "1":
        why_not = "TESTS_INSTALL_CUDA=1 downloads some GB"
    if why_not:
        pytest.skip(why_not)
    root = tmp_path / "root"
    make(root)
    print(f"install.sh took {install(root, 'cuda'):.0f} s")
    found = "import cupy, torch, triton; from cupy.cuda import nccl; print(nccl.get_version())"
    subprocess.run(command(root, "python", "-c", found, user=USER), check=True, cwd="/")
    kernels = f"cd {CHECKOUT}; exec python -W ignore -m tests.support.served_kernels rows"
    caches = {"TRITON_CACHE_DIR": f"{CACHE}/triton", "NUMBA_CACHE_DIR": f"{CACHE}/numba"}
    wanted = command(root, "sh", "-c", kernels, user=USER, **caches)
    told = subprocess.run(wanted, check=True, cwd="/", capture_output=True, text=True).stdout
    print(told)
    assert "compute capability 9.0" in told
    assert list((root / "cache" / "triton").rglob("*.cubin")), "compiled elsewhere"
