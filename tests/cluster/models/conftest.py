"""A Hub on this machine with the demo pair on it, and a cache that is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_cases import Fetching
from tests.support.hub_server import HubServer, Repository, hub_serving
from tests.support.paths import DEMO, DEMO_DRAFT


@pytest.fixture
def server() -> Iterator[HubServer]:
    pair = {"lexshard/demo": DEMO, "lexshard/draft": DEMO_DRAFT}
    repositories = {name: Repository.of_folder(folder) for name, folder in pair.items()}
    with hub_serving(repositories) as serving:
        yield serving


@pytest.fixture
def fetching(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    # As the library found them when it was imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lexshard.cluster.models.download.PAUSE_SECONDS", 0.0)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    return Fetching(server, tmp_path / "cache")
