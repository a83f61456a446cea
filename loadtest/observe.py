"""``make observe``: Prometheus, and Grafana where there is one, at a running server, with the rules
and the dashboard of ``k8s/overlays/monitoring``.

    python -m lexshard.loadtest.observe --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MONITORING = Path(__file__).parents[1] / "k8s" / "overlays" / "monitoring"
# Where Debian's and Grafana's own packages put what a server needs beside its program.
GRAFANA_HOME = Path("/usr/share/grafana")
SCRAPE_SECONDS = 5


def prometheus_configuration(url: str) -> str:
    """For Prometheus (JSON is YAML): the server at ``url`` and the alert rules."""
    address = urlsplit(url)
    if not address.hostname:
        raise ValueError(f"give an address like http://127.0.0.1:8000, not {url}")
    host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
    port = address.port or (443 if address.scheme == "https" else 80)
    scrape: dict[str, Any] = {
        "job_name": "lexshard",
        "scheme": address.scheme,
        "metrics_path": f"{address.path.rstrip('/')}/metrics",
        "static_configs": [{"targets": [f"{host}:{port}"]}],
    }
    if address.scheme == "https":  # a certificate of a server nearby is often its own
        scrape["tls_config"] = {"insecure_skip_verify": True}
    return json.dumps(
        {
            "global": {
                "scrape_interval": f"{SCRAPE_SECONDS}s",
                "evaluation_interval": f"{SCRAPE_SECONDS}s",
            },
            "rule_files": [str(MONITORING / "alerts.yaml")],
            "scrape_configs": [scrape],
        },
        indent=2,
    )


def prometheus_command(program: str, folder: Path, url: str, port: int) -> list[str]:
    """Writes the configuration into ``folder``; what starts Prometheus with it, on loopback."""
    path = folder / "prometheus.yml"
    path.write_text(prometheus_configuration(url), encoding="utf-8")
    return [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]


def grafana_provisioning(folder: Path, prometheus_port: int) -> dict[str, str]:
    """Writes what tells Grafana of Prometheus and the dashboard; its environment."""
    sources, providers = folder / "datasources", folder / "dashboards"
    for each in (sources, providers):
        each.mkdir(parents=True)
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "url": f"http://127.0.0.1:{prometheus_port}",
        "isDefault": True,
        "jsonData": {"timeInterval": f"{SCRAPE_SECONDS}s"},
    }
    provider = {"name": "lexshard", "type": "file", "options": {"path": str(MONITORING)}}
    (sources / "prometheus.yaml").write_text(json.dumps({"apiVersion": 1, "datasources": [source]}))
    (providers / "lexshard.yaml").write_text(json.dumps({"apiVersion": 1, "providers": [provider]}))
    return {
        "GF_PATHS_PROVISIONING": str(folder),
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }


def _start_grafana(folder: Path, prometheus_port: int, port: int) -> subprocess.Popen[bytes] | None:
    program = shutil.which("grafana-server")
    if program is None:
        print("no Grafana here: k8s/overlays/monitoring/dashboard.json is the dashboard to import")
        return None
    environment = grafana_provisioning(folder, prometheus_port) | {"GF_SERVER_HTTP_PORT": str(port)}
    print(f"Grafana on http://127.0.0.1:{port}/d/lexshard")
    return subprocess.Popen(
        [program, "--homepath", str(GRAFANA_HOME)], env={**os.environ, **environment}
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until SIGINT or SIGTERM, or until Prometheus has ended; the exit status."""
    parser = argparse.ArgumentParser("python -m lexshard.loadtest.observe", description=__doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server")
    add("--prometheus-port", type=int, default=9090, metavar="PORT")
    add("--grafana-port", type=int, default=3000, metavar="PORT")
    given = parser.parse_args(arguments)
    program = shutil.which("prometheus")
    if program is None:
        print("no Prometheus here: apt-get install prometheus, or see prometheus.io/download")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="lexshard-observe-") as name:
        folder = Path(name)
        port = given.prometheus_port
        command = prometheus_command(program, folder, given.url, port)
        started: list[subprocess.Popen[bytes]] = [subprocess.Popen(command)]
        print(f"Prometheus on http://127.0.0.1:{port}, looking at {given.url}/metrics")
        try:
            grafana = _start_grafana(folder / "grafana", port, given.grafana_port)
            started += [grafana] if grafana is not None else []
            sys.stdout.flush()
            while started[0].poll() is None:
                time.sleep(0.5)
            return started[0].returncode
        except KeyboardInterrupt:
            return 0
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
