"""``lexshard serve ORG/NAME``: fetched from a Hub and served under that name, by a stranger's
command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.hub_server import COMMIT, HubServer, Repository, hub_serving
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.real_server import running_server

NAME, DRAFT = "lexshard/demo", "lexshard/draft"


@pytest.fixture
def server() -> Iterator[HubServer]:
    pair = {NAME: DEMO, DRAFT: DEMO_DRAFT}
    repositories = {name: Repository.of_folder(folder) for name, folder in pair.items()}
    with hub_serving(repositories) as serving:
        yield serving


@pytest.mark.slow
def test_a_model_and_its_draft_are_served_by_their_names(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, home = tmp_path / "hub", tmp_path / "home"
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    flags = ["--draft", f"{DRAFT}@{COMMIT}", "--head", "certified"]
    asked = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    with running_server(tmp_path, *flags, model=NAME, home=home) as running:
        models = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert [each["id"] for each in models] == [NAME]
        done = httpx.post(f"{running.url}/v1/completions", json=asked, timeout=60)
        assert done.status_code == 200, done.text
        assert done.json()["usage"]["completion_tokens"] == 8
        log = running.log.read_text()
    assert f"fetching {NAME} (13.6 MiB)" in log
    assert f"model        {NAME} (commit {COMMIT[:12]} of the Hub, 7,145,728 parameters)" in log
    weights = sum((each / "model.safetensors").stat().st_size for each in (DEMO, DEMO_DRAFT))
    assert server.sent() == weights
    # The index is no file of the Hub's: it is found by the weights' hash.
    assert not list(cache.rglob("*.lexshard"))
    assert len(list(home.glob("*.lexshard"))) == 1
