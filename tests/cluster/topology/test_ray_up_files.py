"""Files of `ray up`: ours are valid, and what Ray would ignore is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lexshard.cluster.topology.ray_up import ClusterFileError, check_cluster_file
from lexshard.serve_app.cli import main
from tests.support.manifests import misspelt
from tests.support.paths import ROOT

FILES = [ROOT / "cluster" / f"{name}.yaml" for name in ("local", "aws", "gcp")]
# The author's own names, which nobody can misspell; the head's is asked for by head_node_type.
NAMES = {"available_node_types.gang", "file_mounts.~/lexshard", "file_mounts.~/.ray/auth_token"}


def _content(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def _name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_ours_are_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "check", str(path)]) == 0
    assert f"is valid: {path.stem}" in capsys.readouterr().out


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_ours_ask_for_a_token_and_keep_the_dashboard_to_the_machine(path: Path) -> None:
    content = _content(path)
    for name in ("head", "worker"):
        for command in content[f"{name}_start_ray_commands"]:
            if "ray start" in command:
                assert "RAY_AUTH_MODE=token" in command
                assert ("--head" in command) == ("--dashboard-host=127.0.0.1" in command)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_environments_of_a_checkout_are_not_copied(path: Path) -> None:
    assert {"**/.venv", "**/.vllm"} <= set(_content(path)["rsync_exclude"])


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_misspelt_key_is_named(path: Path, tmp_path: Path) -> None:
    missed = []
    for where, wrong in misspelt(_content(path)):
        if where in NAMES or ".node_config." in where:  # that the cloud's own API checks
            continue
        try:
            check_cluster_file(_written(tmp_path, wrong))
        except ClusterFileError as error:
            last = where.rpartition(".")[2]
            if last[:-1] in str(error):
                continue
        missed.append(where)
    assert missed == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_workers": "1"}, "max_workers: '1' is not of type"),
        ({"max_workers": 0}, "smaller than"),
        ({"head_node_type": "chief"}, "head_node_type"),
        ({"provider": {"type": "aws"}}, "provider has no region"),
        ({"provider": {"type": "azur"}}, "provider.type is one of local, aws, gcp, not 'azur'"),
    ],
)
def test_what_ray_refuses_is_told_before_anything_starts(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ClusterFileError) as error:
        check_cluster_file(_written(tmp_path, _content(FILES[1]) | change))
    assert told in str(error.value)


def test_a_machine_has_no_types_of_nodes_and_a_list_of_others(tmp_path: Path) -> None:
    content = _content(FILES[0])
    with pytest.raises(ClusterFileError, match="unknown key 'docker'"):
        check_cluster_file(_written(tmp_path, content | {"docker": {}}))
    del content["provider"]["worker_ips"]
    with pytest.raises(ClusterFileError, match="provider has no worker_ips"):
        check_cluster_file(_written(tmp_path, content))


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _content(FILES[2])
    content["provider"]["zone"] = content["provider"].pop("availability_zone")
    assert main(["cluster", "check", str(_written(tmp_path, content))]) == 2
    assert "provider: unknown key 'zone'" in capsys.readouterr().err
