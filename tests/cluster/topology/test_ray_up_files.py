"""Files of `ray up`: ours are valid, and what Ray would ignore is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from lexshard.cluster.topology.ray_up import (
    ClusterFileError,
    NodeGroup,
    advice,
    node_groups,
    read_cluster_file,
)
from lexshard.serve_app.cli import main
from tests.support.manifests import misspelt
from tests.support.paths import DEMO, ROOT

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
def test_ours_are_valid_and_need_no_advice(path: Path) -> None:
    file = read_cluster_file(path)
    assert list(advice(file)) == []


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_every_misspelt_key_is_named(path: Path, tmp_path: Path) -> None:
    missed = []
    for where, wrong in misspelt(_content(path)):
        if where in NAMES or ".node_config." in where:  # that the cloud's own API checks
            continue
        try:
            read_cluster_file(_written(tmp_path, wrong))
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
        ({"provider": {"type": "local", "head_ip": "a"}}, "provider has no worker_ips, a list"),
        ({"provider": {"type": "azur"}}, "provider.type is one of local, aws, gcp, not 'azur'"),
    ],
)
def test_what_ray_refuses_is_told_before_anything_starts(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ClusterFileError) as error:
        read_cluster_file(_written(tmp_path, _content(FILES[1]) | change))
    assert told in str(error.value)


def test_nodes_are_those_of_the_file() -> None:
    of_aws = node_groups(read_cluster_file(FILES[1]))
    assert of_aws == (
        NodeGroup("head", 1, 1, cpus=0, gpus=0, memory=0, gpu_memory=0),
        NodeGroup("gang", 1, 1, 48, 4, memory=160 * 2**30, gpu_memory=24 * 10**9),
    )
    of_local = node_groups(read_cluster_file(FILES[0]))
    assert of_local == (NodeGroup("head", 1, 1, 2, 0, memory=4 * 2**30, gpu_memory=0),)


def test_resources_that_ray_would_count_itself_are_an_error(tmp_path: Path) -> None:
    content = _content(FILES[0])
    start = content["head_start_ray_commands"]
    start[1] = start[1].replace("--num-cpus=2", "")
    with pytest.raises(ClusterFileError, match="says no CPU"):
        node_groups(read_cluster_file(_written(tmp_path, content)))


def test_gpus_of_unknown_size_are_an_error(tmp_path: Path) -> None:
    content = _content(FILES[1])
    del content["available_node_types"]["gang"]["labels"]
    with pytest.raises(ClusterFileError, match="has GPUs but no label lexshard/gpu-memory"):
        node_groups(read_cluster_file(_written(tmp_path, content)))


def test_advice_is_given(tmp_path: Path) -> None:
    content = copy.deepcopy(_content(FILES[1]))
    content["head_start_ray_commands"] = ["ray start --head --dashboard-host=0.0.0.0"]
    file = read_cluster_file(_written(tmp_path, content))
    told = " ".join(advice(file))
    for word in ("RAY_AUTH_MODE", "dashboard listens on 0.0.0.0"):
        assert word in told


@pytest.mark.parametrize(("shards", "code"), [(2, 0), (8, 2)])
def test_a_gang_has_room_or_not(
    shards: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"model: {DEMO}\nshards: {shards}\n", encoding="utf-8")
    assert main(["cluster", "check", str(FILES[1]), "--config", str(config)]) == code
    told = capsys.readouterr()
    assert "is valid: aws, 1 head (0 CPUs), 1 gang (48 CPUs, 4 GPUs)" in told.out
    assert ("cannot place shard" in told.err) == (code != 0)


def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = _content(FILES[2])
    content["provider"]["zone"] = content["provider"].pop("availability_zone")
    assert main(["cluster", "check", str(_written(tmp_path, content))]) == 2
    assert "provider: unknown key 'zone'" in capsys.readouterr().err
