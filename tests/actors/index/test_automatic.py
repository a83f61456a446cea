"""An index is found or built where it is needed, and never of other weights."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.body.loading import LoadedModel, load
from lexshard.actors.index.automatic import default_index_path, open_or_build
from lexshard.actors.index.build import IndexSettings, build_index, own_rows
from lexshard.actors.index.container import Header, read_header
from lexshard.actors.index.errors import IndexFileError, IndexMismatchError
from lexshard.actors.index.format import Index, describe_weights
from lexshard.actors.index.steps import alone
from tests.support.index_cases import SETTINGS, Silent, Tiny
from tests.support.paths import DEMO
from tests.support.tiny_models import save_tiny


class Own:
    """A copy of the tiny model's folder to build in, and what was announced."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        self.folder, self.model = folder, tiny.model
        self.said: list[str] = []
        self.beside = folder / "vocabulary.lexshard"

    def open(self, path: Path | None = None, **options: Any) -> Index:
        return open_or_build(
            self.folder,
            self.model,
            path,
            announce=self.said.append,
            progress=Silent(),
            **options,
        )


@pytest.fixture
def own(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Own:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Own(tiny, folder)


def test_first_use_builds_beside_the_model_and_the_next_loads(own: Own) -> None:
    first = own.open()
    assert set(first.tiers) == {"int8", "int4"}
    assert first.clusters is None
    assert len(own.said) == 1
    assert "building" in own.said[0]
    written = own.beside.stat().st_mtime_ns
    again = own.open(tiers=("int4",))
    assert set(again.tiers) == {"int4"}
    assert own.beside.stat().st_mtime_ns == written
    assert len(own.said) == 1
    assert [path.name for path in own.folder.iterdir()] == [own.beside.name]


def test_what_is_missing_is_added_to_what_is_there(own: Own) -> None:
    settings = IndexSettings(tiers=("int8",), clusters=7, kind="spherical", iterations=2, seed=3)
    build_index(own.folder, own.model, own.beside, settings, progress=Silent())
    before = read_header(own.beside)
    index = own.open(tiers=("int4",))
    assert set(index.tiers) == {"int4"}
    after = read_header(own.beside)
    assert after.tiers == ("int8", "int4")
    assert before.parts.items() <= after.parts.items()  # nothing was made again or lost
    assert own.open(clusters=True).clusters is not None


def test_two_first_starts_that_want_different_parts_get_both(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "lexshard.actors.index.automatic.build_index"

    def wait_for_the_other(*asked: Any, **named: Any) -> Header:
        monkeypatch.setattr(name, build_index)
        own.open(tiers=("int4",))
        return build_index(*asked, **named)

    monkeypatch.setattr(name, wait_for_the_other)
    assert set(own.open(tiers=("int8",)).tiers) == {"int8"}
    assert set(read_header(own.beside).tiers) == {"int8", "int4"}


def test_clusters_come_where_asked_and_cheap(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lexshard.actors.index.automatic.CHEAP_PRODUCTS", 10.0)
    assert own.open(clusters=True).clusters is None
    assert "lexshard index build" in own.said[-1]
    monkeypatch.undo()
    index = own.open(tiers=(), clusters=True)
    assert index.clusters is not None
    assert index.tiers == {}


@pytest.mark.slow
def test_an_index_of_other_weights_is_replaced_if_found_and_refused_if_named(
    own: Own, tmp_path: Path
) -> None:
    other = save_tiny("phi", tmp_path / "other", seed=1)
    build_index(other, load(other, device="cpu"), own.beside, SETTINGS, progress=Silent())
    foreign = tmp_path / "foreign.safetensors"
    foreign.write_bytes(own.beside.read_bytes())
    with pytest.raises(IndexMismatchError):
        own.open(foreign)
    own.open()
    assert "built from output weights" in own.said[0]
    head = own_rows(own.model)
    assert read_header(own.beside).weights == describe_weights(head.weight, head.bias)


def test_a_damaged_index_is_replaced_if_found_and_refused_if_named(own: Own) -> None:
    own.open()
    whole = own.beside.read_bytes()
    torn = bytearray(whole)
    torn[-5] ^= 1
    own.beside.write_bytes(torn)
    with pytest.raises(IndexFileError, match="damaged"):
        own.open(own.beside)
    own.open()
    assert any("damaged" in line for line in own.said)
    assert own.beside.read_bytes() == whole


def test_a_folder_that_cannot_be_written_sends_the_index_to_the_cache(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access  # a test may run as root, who may write everywhere
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != own.folder and access(path, mode)
    )
    head = own_rows(own.model)
    path = default_index_path(own.folder, describe_weights(head.weight, head.bias))
    assert path.parent == tmp_path / "cache" / "lexshard"
    own.open()
    assert path.is_file()
    assert not own.beside.exists()
    own.open()
    assert len(own.said) == 1


def test_a_snapshot_of_the_hubs_cache_sends_the_index_to_ours(own: Own, tmp_path: Path) -> None:
    """Where another commit of the same weights finds it, too."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        own.folder = repository / "snapshots" / commit
        own.folder.mkdir(parents=True)
        own.open()
        assert list(own.folder.iterdir()) == []
    assert len(own.said) == 1
    assert len(list((tmp_path / "cache" / "lexshard").glob("*.lexshard"))) == 1


def test_builds_in_one_folder_wait_for_each_other(tmp_path: Path) -> None:
    events: list[str] = []

    def second() -> None:
        with alone(tmp_path):
            events.append("second")

    with alone(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        events.append("first")
    thread.join(timeout=10)
    assert events == ["first", "second"]


@pytest.mark.slow
def test_the_demo_model_has_an_index(demo: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "index.safetensors"
    build_index(DEMO, demo, out, progress=Silent())
    metadata = read_header(out).metadata()
    assert metadata.weights.rows == 16384
    assert metadata.clusters is not None
    assert metadata.clusters.requested == 246
    assert metadata.clusters.fine_tokens >= 10
    assert metadata.tiers["int8"].tightness.kept["top-1"] < 0.001 * 16384
    assert metadata.tiers["int8"].tightness.bytes_read["top-50"] < 0.6 * 2 * 16384 * 256
