"""Ray nodes of one machine in network namespaces of their own, whose cables can be pulled."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lexshard.cluster.ports import free_port
from tests.support.real_server import wait

SUBNET = "10.213.77"  # of a bridge on this machine alone
START_SECONDS = 60.0


def why_not() -> str | None:
    """Why there can be no such nodes here."""
    name = f"lexshard-{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        with _bridge():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"no network namespaces here: {said.strip()}"
    return None


@dataclass(frozen=True, slots=True)
class NodeApart:
    """A Ray node that reaches the others over one cable."""

    address: str
    namespace: str
    cable: str

    def cut(self) -> None:
        """Nothing comes through any more, and no end is told so."""
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self.cable, "up")

    def processes(self) -> list[int]:
        """All that runs there."""
        return [int(line) for line in _ip("netns", "pids", self.namespace).split()]


@contextmanager
def nodes_apart(first_cpus: int, *cpus: int) -> Iterator[list[NodeApart]]:
    """Joins a cluster of this machine as its head, with ``first_cpus``, and a node apart for each
    of ``cpus``; yields these."""
    from lexshard.cluster.lifecycle import prepare_environment

    prepare_environment()
    import ray

    home, port = f"{SUBNET}.1", free_port()
    with ExitStack() as ends:
        bridge = ends.enter_context(_bridge())
        head = ("--head", f"--port={port}", "--include-dashboard=false")
        ends.enter_context(_raylet((), home, first_cpus, *head))
        wait(lambda: _reached(home, port), START_SECONDS, "the head")
        ray.init(address=f"{home}:{port}", _node_ip_address=home, log_to_driver=True)
        ends.callback(ray.shutdown)
        nodes = []
        for index, count in enumerate(cpus):
            node = ends.enter_context(_node(bridge, index))
            inside = ("ip", "netns", "exec", node.namespace)
            to = f"--address={home}:{port}"
            ends.enter_context(_raylet(inside, node.address, count, to))
            nodes.append(node)
            # One after the other: they share a folder of sockets, and would take one name.
            wait(lambda: len(ray.nodes()) == 1 + len(nodes), START_SECONDS, "a node")
        yield nodes


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def _bridge() -> Iterator[str]:
    name = f"lx{os.getpid()}"
    _ip("link", "add", name, "type", "bridge")
    try:
        _ip("address", "add", f"{SUBNET}.1/24", "dev", name)
        _ip("link", "set", name, "up")
        yield name
    finally:
        _ip("link", "del", name)


@contextmanager
def _node(bridge: str, index: int) -> Iterator[NodeApart]:
    namespace, cable = f"lexshard-{os.getpid()}-{index}", f"{bridge}n{index}"
    node = NodeApart(f"{SUBNET}.{index + 2}", namespace, cable)
    inside = ("netns", "exec", namespace, "ip")
    _ip("netns", "add", namespace)
    try:
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", bridge, "up")
        _ip(*inside, "address", "add", f"{node.address}/24", "dev", "eth0")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "link", "set", "lo", "up")
        yield node
    finally:
        for process_id in node.processes():
            subprocess.run(["kill", "-9", str(process_id)], check=False)
        _ip("netns", "del", namespace)


@contextmanager
def _raylet(inside: tuple[str, ...], address: str, cpus: int, *where: str) -> Iterator[None]:
    program = (str(Path(sys.executable).parent / "ray"), "start", "--block")
    process = subprocess.Popen(
        [*inside, *program, *where, f"--node-ip-address={address}", f"--num-cpus={cpus}"],
        # More nodes than one; and no token that some Ray has left in this user's home, which a
        # `ray start` takes up by itself, a driver that names an address does not.
        env={
            "RAY_AUTH_MODE": "disabled",
            **os.environ,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
