"""A folder that exists wins; what looks like ORG/NAME or NAME is the Hub's; a path is a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from lexshard.cluster.models.names import HubName, ModelNameError, hub_name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("gpt2", HubName("gpt2")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("models/gone", HubName("models/gone")),
        ("./models/gone", None),
        ("/models/gone", None),
        ("~/gone", None),
        ("models/gone/", None),
        ("a/b/c", None),
        ("../gone", None),
        ("org/.hidden", None),
        ("org/two--dashes", None),
        ("org/name@", None),
        ("", None),
    ],
)
def test_what_looks_like_a_name_is_one_unless_it_is_a_path(
    given: str, name: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(given) == name


def test_a_folder_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("org/name", "name", "org/name@main"):
        Path(folder).mkdir(parents=True)
        assert hub_name(folder) is None


def test_a_revision_stands_in_the_name_or_beside_it_once() -> None:
    assert hub_name("org/name", "v1") == hub_name("org/name@v1") == HubName("org/name", "v1")
    assert hub_name("org/name@v1", "v1") == HubName("org/name", "v1")
    with pytest.raises(ModelNameError, match="leave one out"):
        hub_name("org/name@v1", "v2")
    with pytest.raises(ModelNameError, match="is a path: leave it out"):
        hub_name("./name", "v2")
