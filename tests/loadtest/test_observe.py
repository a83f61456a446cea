"""``make observe``: what Prometheus and Grafana are started with."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lexshard.loadtest.observe import (
    grafana_provisioning,
    prometheus_command,
    prometheus_configuration,
)


def test_prometheus_looks_where_the_server_is() -> None:
    told = json.loads(prometheus_configuration("https://llm.example/own"))
    [scrape] = told["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["llm.example:443"]}]
    assert (scrape["scheme"], scrape["metrics_path"]) == ("https", "/own/metrics")
    [scrape] = json.loads(prometheus_configuration("http://[::1]:8000"))["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["[::1]:8000"]}]
    with pytest.raises(ValueError, match="address"):
        prometheus_configuration("127.0.0.1:8000")


def test_prometheus_takes_its_configuration_with_the_rules(tmp_path: Path) -> None:
    command = prometheus_command("prometheus", tmp_path, "http://127.0.0.1:8000", 9090)
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here (Debian: apt-get install prometheus)")
    path = command[1].removeprefix("--config.file=")
    checked = subprocess.run(
        [promtool, "check", "config", path], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "rules found" in checked.stdout


def test_grafana_is_told_of_prometheus_and_of_the_folder_of_the_dashboard(tmp_path: Path) -> None:
    environment = grafana_provisioning(tmp_path / "grafana", 9191)
    folder = Path(environment["GF_PATHS_PROVISIONING"])
    [source] = json.loads((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9191"
    [provider] = json.loads((folder / "dashboards/lexshard.yaml").read_text())["providers"]
    assert (Path(provider["options"]["path"]) / "dashboard.json").is_file()
