"""`ray up cluster/local.yaml` for real, over ssh to 127.0.0.1, and `ray down` after it.

``python -m tests.support.ray_up WORK`` starts itself anew in namespaces of its own: of processes,
because `ray stop` ends every Ray of a machine; of the network, because Ray's launcher knows no
other port of ssh than 22; of mounts, with a home and a /tmp that vanish. WORK is an empty folder.
What it prints last is JSON: seconds by step, the text of a server, what was left.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
import venv
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.support.paths import ROOT
from tests.support.real_server import healthy, wait

TOOLS = ("sshd", "ssh", "ssh-keygen", "rsync", "unshare", "ip")
USER = pwd.getpwuid(os.getuid())
HOME = Path(USER.pw_dir)
# What `ray up` and Ray leave on a machine; docs/deploy.md says so.
MAY_STAY = {".ray", ".bashrc", "lexshard", "lexshard-environment", "ray_bootstrap_config.yaml"}
MAY_STAY |= {"ray_bootstrap_key.pem", ".cache", ".config"}
PROMPT = "Once upon a time"
SAMPLING = {"max_tokens": 40, "seed": 7, "temperature": 0.8, "top_k": 50, "top_p": 0.95}

# Instead of $1, an empty folder in which only $2, $3, ... are where they were.
_HIDE = """
hide() {
    hidden=$1
    shift
    mount -t tmpfs tmpfs "$work"
    for kept; do
        case $kept in "$hidden"/*)
            mkdir -p "$work${kept#"$hidden"}"
            mount --bind "$kept" "$work${kept#"$hidden"}" ;;
        esac
    done
    mount --move "$work" "$hidden"
}
work=$1 home=$2
shift 2
hide "$home" "$@"
hide /tmp "$@"
mount -t tmpfs tmpfs /run
mkdir /run/sshd
ip link set lo up
exec "$0" -m tests.support.ray_up
"""


def missing() -> str | None:
    """Why it cannot be done here; None: it can."""
    if os.geteuid() != 0:
        return "namespaces and sshd need root"
    tools = ", ".join(name for name in TOOLS if _which(name) is None)
    return f"no {tools} here (openssh-server, rsync, iproute2)" if tools else None


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def command(work: Path) -> list[str]:
    """This module in its namespaces."""
    kept = [str(ROOT), sys.prefix, sys.base_prefix]
    return [
        *("unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-euc", _HIDE, sys.executable, str(work), str(HOME), *kept),
    ]


# -- inside ---------------------------------------------------------------------------------------


def start_sshd(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A server that takes one key, made here; its process and the key."""
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    settings = {
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        # There is no network: what is to be installed is here already, but for lexshard itself.
        "SetEnv": "PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0",
    }
    config = folder / "config"
    config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    sshd = _which("sshd")
    assert sshd is not None
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stderr=log), folder / "user"


def make_environment(folder: Path) -> None:
    """Where install.sh installs: all but lexshard is found where this interpreter finds it."""
    venv.create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "beside.pth").write_text("\n".join(ours) + "\n")
    for name, module in (("ray", "ray.scripts.scripts"), ("serve", "ray.serve.scripts")):
        script = folder / "bin" / name
        entry = "main" if name == "ray" else "cli"
        script.write_text(f"#!{folder}/bin/python\nfrom {module} import {entry}\n{entry}()\n")
        script.chmod(0o755)


def cluster_file(key: Path) -> Path:
    """cluster/local.yaml for this user; nothing else in it is changed."""
    content = yaml.safe_load((ROOT / "cluster" / "local.yaml").read_text(encoding="utf-8"))
    content["auth"] = {"ssh_user": USER.pw_name, "ssh_private_key": str(key)}
    path = Path("/tmp/cluster.yaml")
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def launcher(*words: str) -> str:
    """The output of a command of Ray's launcher, which must succeed."""
    script = "from ray.scripts.scripts import main; main()"
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    print(done.stdout[-6000:], done.stderr[-6000:], flush=True)
    assert done.returncode == 0, f"ray {words[0]} ended with {done.returncode}"
    return done.stdout


def listening() -> dict[int, str]:
    """Ports, and where they are open."""
    found = psutil.net_connections(kind="tcp")
    return {each.laddr.port: each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def served_text(key: Path) -> str:
    """What a server that joins the cluster says."""
    url = "http://127.0.0.1:8000"
    ssh = ["ssh", "-tt", "-i", str(key), "-o", "StrictHostKeyChecking=no"]
    ssh += ["-o", "UserKnownHostsFile=/dev/null"]  # a home of ours is looked at afterwards
    serve = "lexshard serve --model ~/lexshard/models/lexshard-demo --address auto --head dense"
    words = [*ssh, f"{USER.pw_name}@127.0.0.1", f"bash -ic 'exec {serve} --threads 1'"]
    with Path("/tmp/server.log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        wait(lambda: healthy(url) or process.poll() is not None, 300, "a server")
        assert process.poll() is None, Path("/tmp/server.log").read_text()
        body = {"model": "lexshard-demo", "prompt": PROMPT, **SAMPLING}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        return str(reply.json()["choices"][0]["text"])
    finally:
        assert process.stdin is not None
        process.stdin.write(b"\x03")  # its terminal's interrupt
        process.stdin.flush()
        process.wait(90)


def running(own: set[int]) -> list[str]:
    """Command lines of processes but ``own``; children of others stay zombies here."""
    return [
        " ".join(each.info["cmdline"] or [])
        for each in psutil.process_iter(["cmdline", "status"])
        if each.pid not in own and each.info["status"] != psutil.STATUS_ZOMBIE
    ]


def left_behind(sshd: psutil.Process, ports: set[int], files: set[str]) -> dict[str, list[str]]:
    """What was not there before: ``ports``, ``files`` of the home."""
    own = {os.getpid(), sshd.pid}
    with suppress(AssertionError):  # ssh keeps connections for ten seconds
        wait(lambda: not running(own) and listening().keys() <= ports, 30, "what stays")
    made = {each.name for each in HOME.iterdir()} - files - MAY_STAY
    opened = [str(port) for port in sorted(listening().keys() - ports)]
    return {"processes": running(own), "ports": opened, "files": sorted(made)}


def inside() -> dict[str, Any]:
    os.environ["HOME"] = str(HOME)
    files = {each.name for each in HOME.iterdir()}
    shutil.copy("/etc/skel/.bashrc", HOME)
    make_environment(HOME / "lexshard-environment")
    sshd, key = start_sshd(Path("/tmp/ssh"))
    path = str(cluster_file(key))
    time.sleep(1)
    before = listening()
    assert before.keys() == {22}, (Path("/tmp/ssh/log").read_text(), before)
    seconds: dict[str, float] = {}
    started = time.monotonic()
    launcher("up", "--yes", "--no-config-cache", path)
    seconds["ray up"] = time.monotonic() - started
    status = launcher("exec", path, "RAY_AUTH_MODE=token ray status")
    open_to_all = launcher("exec", path, "RAY_AUTH_MODE=disabled ray status || echo refused")
    dashboard = listening().get(8265, "")
    started = time.monotonic()
    text = served_text(key)
    seconds["serve"] = time.monotonic() - started
    started = time.monotonic()
    launcher("down", "--yes", path)
    seconds["ray down"] = time.monotonic() - started
    left = left_behind(psutil.Process(sshd.pid), set(before), files)
    sshd.terminate()
    sshd.wait(10)
    return {
        "seconds": {name: round(each, 1) for name, each in seconds.items()},
        "status": status,
        "refused": "refused" in open_to_all,
        "dashboard": dashboard,
        "text": text,
        "left": left,
    }


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(subprocess.run(command(Path(sys.argv[1])), cwd=ROOT, check=False).returncode)
    print(json.dumps(inside()), flush=True)
