"""`serve_app.build:app`: what Ray Serve's configurations name, and what it says of bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import PROCESSOR
from lexshard.cluster.ingress import BINARY
from lexshard.cluster.joining import JoinError, Node, Versions
from lexshard.serve_app import build
from lexshard.serve_app.build import app, read_args
from tests.support.mock_server import model_folder
from tests.support.paths import DEMO, SERVE_EXAMPLE

pytestmark = pytest.mark.usefixtures("no_options_of_the_machine")


def bundles_of(args: dict[str, Any]) -> list[dict[str, float]]:
    """Of the placement group that Ray Serve makes for every replica."""
    built: Any = app(args)
    bundles: list[dict[str, float]] = (
        built._bound_deployment._replica_config.placement_group_bundles
    )
    return bundles


def test_args_are_the_options_of_a_configuration_file() -> None:
    args = {"model": str(DEMO), "shards": 2, "tiers": ["int8"], "kv_cache_memory": "1MiB"}
    assert read_args(args, {}) == ServeConfig(**{**args, "kv_cache_memory": 2**20})


def test_text_stands_for_values_as_in_the_environment() -> None:
    said = read_args({"model": str(DEMO), "shards": "2", "tiers": "int8,int4"}, {})
    assert said == read_args({"model": str(DEMO), "shards": 2, "tiers": ["int8", "int4"]}, {})


def test_variables_are_heard_and_args_win() -> None:
    environment = {"LEXSHARD_SHARDS": "3", "LEXSHARD_API_KEYS": "secret"}
    config = read_args({"model": str(DEMO), "shards": 2}, environment)
    assert config.shards == 2
    assert config.api_keys == ["secret"]


def test_what_a_server_tells_its_ingress_is_no_option() -> None:
    """It is in the environment of Ray's workers, where Serve builds an update."""
    assert read_args({"model": str(DEMO)}, {BINARY: "haproxy"}) == read_args(
        {"model": str(DEMO)}, {}
    )


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO.parent)
    config = read_args({"model": DEMO.name, "draft": "ngram", "index": "an/index"}, {})
    assert config.model == str(DEMO.parent / DEMO.name)
    assert config.draft == "ngram"
    assert config.index == str(DEMO.parent / "an/index")


def test_each_process_of_a_replica_has_a_bundle_the_engine_first() -> None:
    args = {"model": str(DEMO), "device": "cpu", "threads": 2, "shards": 2}
    assert bundles_of(args) == [{"CPU": 2.0}, {"CPU": 1.0}]
    actors = {"samplers": 2, "sampler_placement": "ray", "cpus_per_sampler": 0.5}
    assert bundles_of(args | actors | {"shard_spares": 1}) == [
        {"CPU": 2.0},
        {"CPU": 1.0},
        {"CPU": 1.0},
        {"CPU": 0.5},
        {"CPU": 0.5},
    ]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "no model given"),
        ({"model": "absent"}, "no model folder at"),
        ({"model": "MODEL", "shard": 2}, "unknown option 'shard': did you mean shards?"),
        ({"model": "MODEL", "shards": "two"}, "option 'shards': "),
        ({"model": "MODEL", "head": "dense", "tiers": "int8"}, "--tier screens"),
        ({"model": "MODEL", "cpus_per_body": 0.5, "draft_tokens": 3}, "--draft-tokens is about"),
        ({"model": "MODEL", "port": 80}, "set http_options.port"),
        ({"model": "MODEL", "api_processes": 2}, "set num_replicas"),
        ({"model": "MODEL", "backend": "process"}, "'backend' has no place here"),
        ({"model": "MODEL", "playground_kills": True}, "'playground_kills' has no place here"),
        ({"model": "MODEL", "ssl_certfile": "a"}, "set http_options.ssl_certfile"),
        ({"model": "MODEL", "api_keys": ["a"]}, "LEXSHARD_API_KEYS"),
    ],
)
def test_bad_args_are_told_in_one_sentence(args: dict[str, Any], told: str, tmp_path: Path) -> None:
    if args.get("model") == "MODEL":
        args = args | {"model": str(model_folder(tmp_path))}
    with pytest.raises(RayServeException) as refused:
        app(args)
    assert told in str(refused.value)
    assert str(refused.value).startswith("lexshard: ")
    assert "\n" not in str(refused.value)


def test_the_example_is_valid() -> None:
    data = yaml.safe_load(SERVE_EXAMPLE.read_text(encoding="utf-8"))
    config = ServeDeploySchema.model_validate(data)
    [application] = config.applications
    assert application.import_path == "lexshard.serve_app.build:app"
    assert read_args(application.args | {"model": str(DEMO)}, {}).model == str(DEMO)
    # Serve's own check passes over what it does not know.
    assert set(data) <= set(ServeDeploySchema.model_fields)
    assert set(data["applications"][0]) <= set(type(application).model_fields)


def test_nodes_that_would_draw_other_tokens_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replicas may be on any of them. In float32 all draw the same."""
    monkeypatch.delenv(PROCESSOR, raising=False)
    monkeypatch.setattr(build.ray, "is_initialized", lambda: True)
    nodes = {name: Node(Versions(None, "", ""), name == "one") for name in ("one", "two")}
    monkeypatch.setattr(build, "ask_nodes", lambda: nodes)
    given = {"model": str(DEMO), "device": "cpu"}
    with pytest.raises(RayServeException, match="tokens on node one, which has AMX, than on two"):
        build.app(given | {"dtype": "bfloat16"})
    assert build.app(given | {"dtype": "float32"}) is not None
    monkeypatch.setenv(PROCESSOR, "vectors")
    assert build.app(given | {"dtype": "bfloat16"}) is not None


def test_a_node_that_does_not_answer_stops_no_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> dict[str, Node]:
        raise JoinError("not every node of the cluster answers")

    monkeypatch.delenv(PROCESSOR, raising=False)
    monkeypatch.setattr(build.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(build, "ask_nodes", ask)
    assert build.app({"model": str(DEMO), "device": "cpu", "dtype": "bfloat16"}) is not None
