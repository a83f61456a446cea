"""What is fetched of a model on the Hub, once, and gone on with wherever it broke off."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import get_hf_file_metadata, scan_cache_dir
from huggingface_hub.utils import WeakFileLock

from lexshard.cluster.models.download import TRIES, Downloads, DownloadStoppedError
from lexshard.cluster.models.files import RemoteFile
from lexshard.cluster.models.names import HubName, ModelNameError
from lexshard.cluster.models.progress import FetchProgress
from tests.support.hub_cases import NAME, WEIGHTS, Fetching
from tests.support.hub_server import COMMIT, hub_serving
from tests.support.paths import DEMO, DEMO_DRAFT

SIZE = (DEMO / WEIGHTS).stat().st_size
CUTS = [1, 7, 4096, 1_000_003, SIZE // 2, SIZE - 1]


def served_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_a_server_needs_is_fetched_and_nothing_else(fetching: Fetching) -> None:
    folder = fetching.folder()
    needed = {
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        WEIGHTS,
    }
    assert served_files(folder) == {name: (DEMO / name).read_bytes() for name in needed}
    assert not fetching.server.asked(".bin")
    assert fetching.server.asked(WEIGHTS)[0].name == WEIGHTS
    names = [each.name for each in fetching.server.requests if each.method == "GET"]
    assert names.index("config.json") < names.index("tokenizer.json") < names.index(WEIGHTS)
    assert [each for each in fetching.said if "fetching" in each and "13.6 MiB" in each]
    router = DEMO_DRAFT / "draft-router.tensors"
    assert (fetching.folder("lexshard/draft") / router.name).read_bytes() == router.read_bytes()


def test_what_is_there_is_not_fetched_again(fetching: Fetching) -> None:
    folder = fetching.folder()
    asked = len(fetching.server.requests)
    assert fetching.folder() == folder
    # Only what the Hub has under that name now.
    assert [each.name for each in fetching.server.requests[asked:]] == [f"{NAME}@main"]
    asked = len(fetching.server.requests)
    assert fetching.folder(f"{NAME}@{COMMIT}") == folder
    assert fetching.server.requests[asked:] == []


def test_the_cache_is_that_of_other_tools(fetching: Fetching) -> None:
    folder = fetching.folder()
    cached = scan_cache_dir(fetching.cache)
    assert not cached.warnings
    [repository] = cached.repos
    assert repository.repo_id == NAME
    assert repository.refs["main"].commit_hash == COMMIT
    assert repository.refs["main"].snapshot_path == folder


def test_a_new_commit_brings_what_is_new_alone(fetching: Fetching) -> None:
    old = fetching.folder()
    repository = fetching.server.repositories[NAME]
    repository.commit = "f" * 40
    repository.files |= {"chat_template.jinja": b"{{ messages }}"}
    sent = fetching.server.sent()
    new = fetching.folder()
    assert new != old
    assert (new / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    assert fetching.server.sent() == sent
    fetching.offline = True
    assert fetching.folder() == new


def test_a_model_in_several_files_is_fetched_by_its_index(fetching: Fetching) -> None:
    files = fetching.server.repositories[NAME].files
    whole = files.pop(WEIGHTS)
    parts = {"a.safetensors": whole[:5_000_000], "b.safetensors": whole[5_000_000:]}
    index = b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}'
    files |= parts | {"model.safetensors.index.json": index, "consolidated.safetensors": b"others'"}
    folder = fetching.folder()
    assert {name: (folder / name).read_bytes() for name in parts} == parts
    assert not (folder / "consolidated.safetensors").exists()
    fetching.offline = True
    assert fetching.folder() == folder


def test_one_file_is_fetched_and_not_its_parts(fetching: Fetching) -> None:
    files = fetching.server.repositories[NAME].files
    index = b'{"weight_map": {"x": "a.safetensors"}}'
    files |= {"a.safetensors": b"a part", "model.safetensors.index.json": index}
    folder = fetching.folder()
    assert (folder / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert not (folder / "a.safetensors").exists()
    fetching.offline = True
    assert fetching.folder() == folder


# -- broken off -----------------------------------------------------------------------------------


def test_a_download_that_breaks_off_anywhere_goes_on_by_itself(fetching: Fetching) -> None:
    fetching.server.cuts[WEIGHTS] = list(CUTS)
    folder = fetching.folder()
    assert (folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    ranges = [(each.begin, each.end) for each in fetching.server.asked(WEIGHTS)]
    assert ranges == list(zip([0, *CUTS], [*CUTS, SIZE], strict=True))


@pytest.mark.parametrize("place", CUTS)
def test_the_next_start_goes_on_with_the_next_byte(place: int, fetching: Fetching) -> None:
    """The first one gives up: nothing more comes, however often it asks."""
    fetching.server.cuts[WEIGHTS] = [place] * 20
    told = fetching.refused()
    assert "broke off" in told
    assert "the same command goes on" in told
    partial = fetching.partial()
    assert partial is not None
    assert partial.stat().st_size == place
    assert fetching.server.sent() == place
    fetching.offline = True
    assert "nor a whole model" in fetching.refused()
    fetching.offline = False
    fetching.server.cuts.clear()
    folder = fetching.folder()
    assert (folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    assert fetching.server.sent() == SIZE
    assert "there already" in fetching.said[-1]
    assert fetching.partial() is None


def test_a_mirror_that_knows_no_ranges_sends_all_of_it_again(fetching: Fetching) -> None:
    fetching.server.ranges = False
    fetching.server.cuts[WEIGHTS] = [1000]
    folder = fetching.folder()
    assert (folder / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()
    assert fetching.server.sent() == SIZE + 1000


def test_a_file_that_is_longer_than_the_hub_says_is_given_up(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lexshard.cluster.models.download.get_hf_file_metadata",
        lambda *given, **named: replace(get_hf_file_metadata(*given, **named), size=SIZE - 1),
    )
    downloads = Downloads(fetching.hub(), HubName(NAME), COMMIT)
    endless = threading.Timer(60, downloads.stop)
    endless.start()
    with pytest.raises(ModelNameError, match="its length is not what the Hub says"):
        downloads.fetch(RemoteFile(WEIGHTS, SIZE))
    endless.cancel()
    assert len(fetching.server.asked(WEIGHTS)) == TRIES


def test_a_stop_leaves_what_has_come(fetching: Fetching) -> None:
    class StopAt(FetchProgress):
        def add(self, count: int) -> None:
            super().add(count)
            downloads.stop()

    hub = fetching.hub()
    downloads = Downloads(hub, HubName(NAME), COMMIT)
    progress = StopAt(NAME, SIZE, 0, fetching.said.append, terminal=False)
    with pytest.raises(DownloadStoppedError):
        downloads.fetch(RemoteFile(WEIGHTS, SIZE), progress)
    partial = fetching.partial()
    assert partial is not None
    there = partial.stat().st_size
    assert 0 < there < SIZE
    fetching.folder()
    assert fetching.server.asked(WEIGHTS)[-1].begin == there


def test_a_stop_ends_a_wait_for_another_start(fetching: Fetching) -> None:
    hub = fetching.hub()
    downloads = Downloads(hub, HubName(NAME), COMMIT)
    etag = hashlib.sha256((DEMO / WEIGHTS).read_bytes()).hexdigest()
    lock = hub.cache / ".locks" / hub.storage(HubName(NAME)).name / f"{etag}.lock"
    lock.parent.mkdir(parents=True)
    threading.Timer(0.5, downloads.stop).start()
    with WeakFileLock(lock), pytest.raises(DownloadStoppedError):
        downloads.fetch(RemoteFile(WEIGHTS, SIZE))
    assert fetching.partial() is None


def test_two_who_fetch_the_same_model_fetch_it_once(fetching: Fetching) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetching.folder())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(folders) == 2
    assert fetching.server.sent() == SIZE


def test_all_that_end_at_once_remember_what_they_fetched(fetching: Fetching) -> None:
    hub, name = fetching.hub(), HubName(NAME)
    with ThreadPoolExecutor(8) as threads:
        for commit in (f"{number:040x}" for number in range(100)):
            list(threads.map(hub.remember, [name] * 8, [commit] * 8))
    [reference] = (hub.storage(name) / "refs").iterdir()  # nothing unfinished beside it
    assert reference.read_text() == commit


# -- without the Hub ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [None, 503])
def test_without_the_hub_the_model_that_was_fetched_last_is_taken_and_that_is_said(
    status: int | None, fetching: Fetching
) -> None:
    folder = fetching.folder()
    fetching.server.status = status
    if status is None:
        with hub_serving({}) as closed:
            pass  # at whose port no server listens now
        fetching.server.url = closed.url
    assert fetching.folder() == folder
    assert "taking what was fetched last, 0123456789ab" in fetching.said[-1]


def test_offline_nothing_is_asked(fetching: Fetching) -> None:
    folder = fetching.folder()
    fetching.offline = True
    asked = len(fetching.server.requests)
    assert fetching.folder() == folder
    assert len(fetching.server.requests) == asked


def test_a_token_is_for_the_hub_and_for_no_other_host(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_own")
    fetching.folder()
    tokens = {each.name: each.token for each in fetching.server.requests}
    assert tokens[f"{NAME}@main"] == tokens["config.json"] == "Bearer hf_own"
    assert tokens[WEIGHTS] is None


def test_progress_away_from_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lexshard.cluster.models.progress.LINE_SECONDS", 0.0)
    progress = FetchProgress("org/name", 4 << 30, 1 << 30, said.append, terminal=False)
    progress.add(512 << 20)
    progress.close()
    assert said == ["fetched 1.5 GiB of 4.0 GiB of org/name"]
