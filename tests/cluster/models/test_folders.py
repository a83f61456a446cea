"""Names in a server's configuration become folders once; whoever comes later sees folders alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.models.folders import with_model_folders
from lexshard.cluster.models.hub import Hub
from lexshard.cluster.models.refusal import LoadingOptions
from lexshard.serve_app.start.preflight import ready_to_start
from lexshard.serve_app.start.readiness import StartupError
from tests.support.hub_cases import NAME, Fetching
from tests.support.hub_server import COMMIT
from tests.support.paths import DEMO, DEMO_DRAFT

DRAFT = "lexshard/draft"


@pytest.fixture(autouse=True)
def hub(fetching: Fetching, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The one that the environment names."""
    hub = fetching.hub()
    monkeypatch.setattr("lexshard.cluster.models.hub.Hub.of_environment", lambda: hub)
    return hub


def snapshot(cache: Path, name: str) -> str:
    return str(cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT)


def test_model_and_draft_become_folders_and_clients_know_the_name(fetching: Fetching) -> None:
    given = ServeConfig(model=NAME, revision="main", draft=f"{DRAFT}@{COMMIT}")
    config = with_model_folders(given, fetching.said.append, served=False)
    assert config.model == snapshot(fetching.cache, NAME)
    assert config.draft == snapshot(fetching.cache, DRAFT)
    assert config.model_names == (NAME,)
    assert config.revision is None
    asked = len(fetching.server.requests)
    assert with_model_folders(config, fetching.said.append) == config
    assert len(fetching.server.requests) == asked
    own = ServeConfig(model=f"{NAME}@main", served_model_name=["own"])
    assert with_model_folders(own, fetching.said.append).model_names == ("own",)
    plain = ServeConfig(model=f"{NAME}@main")
    assert with_model_folders(plain, fetching.said.append).model_names == (NAME,)


def test_folders_and_guesses_without_a_model_stay_what_they_are(fetching: Fetching) -> None:
    for draft in (None, "ngram", str(DEMO_DRAFT)):
        config = ServeConfig(model=str(DEMO), draft=draft)
        assert with_model_folders(config, fetching.said.append) == config
        assert config.model_names == ("lexshard-demo",)
    assert fetching.server.requests == []
    assert ServeConfig(model=NAME, draft=DRAFT).with_absolute_paths().model == NAME


def test_what_needs_no_model_is_looked_at_before_one_is_fetched(fetching: Fetching) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for wrong in ({"port": port}, {"hot_vocabulary": "absent"}, {"routing": "load"}):
            with pytest.raises(StartupError):
                ready_to_start(ServeConfig(model=NAME, **wrong), fetching.said.append)
    assert fetching.server.requests == []


def test_a_model_that_ranks_share_is_asked_about_as_such(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft is one process's."""
    asked: list[LoadingOptions] = []
    monkeypatch.setattr(
        "lexshard.cluster.models.fetch.check_refusal", lambda *given: asked.append(given[-1])
    )
    config = ServeConfig(model=NAME, draft=DRAFT, tensor_parallel=4)
    with_model_folders(config, fetching.said.append, weights=False)
    assert [each.tensor_parallel for each in asked] == [4, None]


def test_a_configuration_is_checked_without_weights(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lexshard.cluster.models.fetch.check_refusal", lambda *given: None)
    config = ServeConfig(model=NAME, draft=DRAFT, port=0x7FFF)
    monkeypatch.setattr("lexshard.serve_app.start.preflight.check_listening", lambda config: None)
    found = ready_to_start(config, fetching.said.append, weights=False)
    assert (Path(found.model) / "tokenizer.json").is_file()
    assert not fetching.server.asked(".safetensors")
