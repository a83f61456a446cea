"""A pod that ends while others serve: two Ray nodes, replicas of ours with scripted engines on
both, streams through the first one's proxy, and ``k8s/images/leave.sh`` for the second. What came
of it is ``told.json`` in the folder that is named.

Both nodes are on this machine, so ``ray drain-node`` is told which one is meant, and of processes
only those of that one are looked for: what a pod finds out by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from lexshard.cluster.ports import free_port
from tests.support.mock_server import model_folder
from tests.support.paths import ROOT

STREAM_TOKENS, SHORT_TOKENS = 1600, 100  # 8 s and half a second


def stand_in(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o700)


def main(folder: Path) -> None:
    # The only proxy is on the node that stays, and would ask its own replicas alone.
    os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    leaving = cluster.add_node(num_cpus=1).node_id
    ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    application = {
        "name": "lexshard",
        "route_prefix": "/",
        "import_path": "tests.support.rolling:app",
        "args": {"model": str(model_folder(folder))},
        "deployments": [{"name": "server", "num_replicas": 4, "max_replicas_per_node": 2}],
    }
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema(applications=[application]), _blocking=True)
    url = f"http://127.0.0.1:{port}/v1/completions"
    details = client.get_serve_details()["applications"]["lexshard"]["deployments"]["server"]
    processes = [each["pid"] for each in details["replicas"] if each["node_id"] == leaving]

    def stream(number: int) -> str:
        body = {"prompt": f"{number} cats", "max_tokens": STREAM_TOKENS, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            return "whole" if "data: [DONE]" in list(reply.iter_lines()) else "cut short"

    failures: list[str] = []
    stop = threading.Event()

    def ask(number: int) -> int:
        answered = 0
        while not stop.is_set():
            body = {"prompt": f"{number} dogs", "max_tokens": SHORT_TOKENS}
            reply = httpx.post(url, json=body, timeout=60)
            answered += 1
            if reply.status_code != 200:
                failures.append(reply.text)
        return answered

    with ThreadPoolExecutor(20) as pool:
        streams = [pool.submit(stream, number) for number in range(12)]
        time.sleep(1)
        asked = [pool.submit(ask, number) for number in range(6)]
        programs = folder / "programs"
        programs.mkdir()
        own_ray = Path(sys.executable).with_name("ray")
        node = f"--address {cluster.address} --node-id {leaving}"
        stand_in(programs / "ray", f'exec "{own_ray}" "$@" {node}')
        alive = " || ".join(f"kill -0 {process}" for process in processes)
        stand_in(programs / "pgrep", f"({alive}) 2>/dev/null")
        started = time.monotonic()
        left = subprocess.run(
            ["sh", ROOT / "k8s" / "images" / "leave.sh", "100"],
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        stop.set()
        told = {
            "replicas": len(processes),
            "code": left.returncode,
            "said": left.stderr,
            "seconds": seconds,
            "streams": [each.result() for each in streams],
            "answered": sum(each.result() for each in asked),
            "failures": failures,
        }
    (folder / "told.json").write_text(json.dumps(told))
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
