"""A bare Debian root, in which what an image would do is done: its packages, its install script,
its user, its server.

``python -m tests.support.bare_debian ROOT [cuda]`` does it in ROOT, which is made unless it is
there.
What is mounted and started there ends with the namespace that it is in.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil

from lexshard.cluster.ports import free_port
from tests.support.paths import ROOT

PACKAGES = ("bash", "procps", "tini", "wget")  # as in k8s/images/Dockerfile.cpu
USER = "1000:1000"
CHECKOUT, HOME = "/checkout", "/opt/lexshard"
ENVIRONMENT, CACHE = f"{HOME}/environment", "/cache"
# How this machine reaches what it installs from.
PASSED_ON = re.compile(r"PIP_\w+|\w*_PROXY|\w*_proxy|SSL_CERT_\w+|REQUESTS_CA_BUNDLE")
# pip asks PyPI alone: wheels at hand are of torch without CUDA, as a rule.
PUBLIC = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}

_IN_NAMESPACE = """
mount -t proc proc "$1/proc"
mkdir -p "$1/dev/shm" && mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
for number in null zero full random urandom tty; do
    [ -e "$1/dev/$number" ] || : > "$1/dev/$number"
    mount --bind "/dev/$number" "$1/dev/$number"
done
root=$1
shift
while [ "$1" != -- ]; do
    mkdir -p "$root${1#*:}" && mount --bind "${1%%:*}" "$root${1#*:}"
    shift
done
shift
exec chroot "$@"
"""


def missing() -> str | None:
    """Why it cannot be done here; None: it can."""
    if os.geteuid() != 0:
        return "chroot and debootstrap need root"
    tools = [name for name in ("debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    return f"no {', '.join(tools)} here" if tools else None


def make(root: Path) -> None:
    """The least that Debian 12 is, and what lets pip in there find what it finds out here."""
    if not (root / "bin" / "sh").exists():
        subprocess.run(
            [
                "debootstrap",
                "--variant=minbase",
                "--include=ca-certificates",
                "bookworm",
                str(root),
            ],
            check=True,
        )
    for name in ("pip.conf", "resolv.conf", "ssl/certs/ca-certificates.crt"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), root / "etc" / name)
    user = Path.home() / ".config" / "pip" / "pip.conf"
    if user.exists():
        (root / "root/.config/pip").mkdir(parents=True, exist_ok=True)
        shutil.copy(user, root / "root/.config/pip/pip.conf")


def _mounted() -> list[str]:
    """The checkout, and the folders among pip's indexes."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    paths = {Path(each) for each in re.findall(r"(?:file://)?(/[^\s']+)", told.stdout)}
    # An index links to its files, which lie beside it.
    folders = {path.parent if path.name == "simple" else path for path in paths if path.is_dir()}
    return [f"{ROOT}:{CHECKOUT}", *(f"{folder}:{folder}" for folder in sorted(folders))]


def command(root: Path, *words: str, user: str | None = None, **more: str) -> list[str]:
    """``words`` as they are run in ``root``, by the image's ``user`` or by root."""
    passed = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    environment = {
        "PATH": f"{ENVIRONMENT}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/home/lexshard" if user else "/root",
        **passed,
        **more,
    }
    namespace = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]
    as_user = [f"--userspec={user}"] if user else []
    settings = [f"{name}={value}" for name, value in environment.items()]
    return [
        *(*namespace, _IN_NAMESPACE, "sh", str(root), *_mounted(), "--"),
        *(*as_user, str(root), "env", "-i", *settings, *words),
    ]


def install(root: Path, variant: Literal["cpu", "cuda"] = "cpu") -> float:
    """The steps of the Dockerfile; seconds of its install script."""
    user = "id lexshard 2>/dev/null || useradd --uid 1000 --create-home lexshard"
    folders = f"install --directory --owner lexshard {CACHE} /models"
    packages = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    subprocess.run(
        command(root, "sh", "-euc", f"{packages}; {user}; {folders}"), check=True, cwd="/"
    )
    started = time.monotonic()
    script = f"{CHECKOUT}/k8s/images/install.sh"
    # What pip finds here is what this machine has: it may reach no index of torch's.
    more = {"TORCH_INDEX": ""} if variant == "cpu" else PUBLIC
    wanted = command(root, "sh", script, variant, CHECKOUT, ENVIRONMENT, **more)
    subprocess.run(wanted, check=True, cwd="/")
    seconds = time.monotonic() - started
    shutil.copytree(ROOT / "models", root / HOME[1:] / "models", dirs_exist_ok=True)
    for name in ("drain.sh", "leave.sh"):
        shutil.copy(ROOT / "k8s/images" / name, root / HOME[1:] / name)
    return seconds


def serve(root: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The image's command, as its user; its process and port."""
    port = free_port()
    words = ["tini", "-g", "--", "lexshard", "serve", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model", f"{HOME}/models/lexshard-demo", "--head", "dense", "--threads", "1"]
    caches = {"XDG_CACHE_HOME": CACHE, "NUMBA_CACHE_DIR": f"{CACHE}/numba"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(root, *words, user=USER, RAY_USAGE_STATS_ENABLED="0", **caches),
            cwd="/",
            stdout=output,
            stderr=output,
        )
    return process, port


def stop(process: subprocess.Popen[bytes]) -> int:
    """Tells the server of `serve`; unshare, which is around it, hears nothing itself."""
    for each in psutil.Process(process.pid).children():
        each.terminate()
    return process.wait(90)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
    wanted: Literal["cpu", "cuda"] = "cuda" if sys.argv[2:] == ["cuda"] else "cpu"
    print(f"install.sh took {install(Path(sys.argv[1]), wanted):.0f} s", flush=True)
