"""What Ray allows in a file of `ray up` and nobody should want."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lexshard.cluster.launcher.file import ClusterFile
from lexshard.cluster.launcher.nodes import NodeGroup

_DASHBOARD = re.compile(r"--dashboard-host(?:=|\s+)(\S+)")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def advice(file: ClusterFile, groups: Sequence[NodeGroup]) -> Iterator[str]:
    """One sentence for each."""
    for name in ("head", "worker"):
        key = f"{name}_start_ray_commands"
        starts = [each for each in file.prepared[key] if re.search(r"\bray start\b", each)]
        for command in starts:
            if "RAY_AUTH_MODE=token" not in command:
                yield f"{key}: without RAY_AUTH_MODE=token whoever reaches Ray's ports runs code"
            host = _DASHBOARD.search(command)
            if host and host.group(1) not in _LOOPBACK:
                yield (
                    f"{key}: the dashboard listens on {host.group(1)}: give it 127.0.0.1, and see "
                    "it with `ray dashboard FILE`"
                )
    head, *workers = groups
    if workers and head.cpus:
        yield f"{head.name} has {head.cpus} CPUs: with 0, nothing runs beside what ends the cluster"
    for group in workers:
        if group.gpus and group.least != group.most:
            yield (
                f"{group.name} has from {group.least} to {group.most} nodes: a gang needs all of "
                "its GPUs at once, so let min_workers be max_workers"
            )
