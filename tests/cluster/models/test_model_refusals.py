"""Why a model cannot be had by its name: one sentence each, before any weight is asked for where
that can be known."""

from __future__ import annotations

import errno
import json
import shutil
from importlib import import_module
from io import BufferedWriter
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from lexshard.cluster.models.hub import explained
from lexshard.cluster.models.names import HubName
from lexshard.cluster.models.refusal import LoadingOptions
from tests.support.hub_cases import NAME, WEIGHTS, Fetching
from tests.support.hub_server import Repository, hub_serving
from tests.support.paths import DEMO
from tests.support.quick import slow

CPU = LoadingOptions(device="cpu")
RANKS = LoadingOptions(device="cpu", tensor_parallel=2)


def with_config(fetching: Fetching, **changed: Any) -> Repository:
    repository = fetching.server.repositories[NAME]
    config = json.loads(repository.files["config.json"]) | changed
    repository.files |= {"config.json": json.dumps(config).encode()}
    return repository


def no_weights_asked(fetching: Fetching) -> bool:
    return not any(each.name.endswith(".safetensors") for each in fetching.server.requests)


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the seconds that a process of its own takes to import torch."""
    monkeypatch.setattr(
        "lexshard.cluster.models.refusal.answer_apart",
        lambda module, function, *given: getattr(import_module(module), function)(*given),
    )


# -- from the names of files and config.json ------------------------------------------------------


@pytest.mark.parametrize("apart", [False, slow(True)])
def test_a_family_that_is_not_served_is_refused_before_weights(
    apart: bool, fetching: Fetching, request: pytest.FixtureRequest
) -> None:
    """Apart: by a process of its own, as all of these are outside of tests."""
    if not apart:
        request.getfixturevalue("asked_here")
    with_config(fetching, model_type="mamba", architectures=["MambaForCausalLM"])
    told = fetching.refused(loading=CPU)
    assert told.startswith(f"{NAME} cannot be served, and is not fetched: the attention of mamba")
    assert "choose a model of another family" in told
    assert no_weights_asked(fetching)
    assert not fetching.server.asked("tokenizer.json")


@pytest.mark.usefixtures("asked_here")
def test_code_of_its_own_is_refused_before_weights(fetching: Fetching) -> None:
    with_config(fetching, model_type="own", auto_map={"AutoConfig": "configuration.Own"})
    told = fetching.refused(loading=CPU)
    assert f"{NAME} needs Python code of its own, which is never run" in told
    assert str(fetching.cache) not in told
    assert no_weights_asked(fetching)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("told_by_hub", [True, False])
def test_what_is_too_large_for_this_machine_is_refused_before_weights(
    told_by_hub: bool, fetching: Fetching
) -> None:
    repository = fetching.server.repositories[NAME]
    repository.claims[WEIGHTS] = 2 << 40
    repository.parameters = {"BF16": 1 << 40} if told_by_hub else None
    told = fetching.refused(loading=CPU)
    # float32 weights, and their packed copies in bfloat16 while these are made.
    assert f"the weights need {6 << 40} bytes (6144.0 GiB)" in told
    assert "use a machine with more memory or a smaller model" in told
    assert no_weights_asked(fetching)


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(("spread", "bytes_each"), [(False, 2), (True, 1)])
def test_ranks_need_less_memory_than_one_process(
    spread: bool, bytes_each: int, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = "lexshard.actors.body.loading.physical_memory"
    shared = structs.replace(RANKS, spread=spread)
    fetching.server.repositories[NAME].parameters = {"BF16": 7_145_728}
    monkeypatch.setattr(memory, lambda: bytes_each * 7_145_728)
    assert "more memory" in fetching.refused(loading=CPU)
    monkeypatch.setattr(memory, lambda: bytes_each * 7_145_728 - 1)
    assert "more memory" in fetching.refused(loading=shared)
    assert no_weights_asked(fetching)
    monkeypatch.setattr(memory, lambda: bytes_each * 7_145_728)
    assert (fetching.folder(loading=shared) / WEIGHTS).is_file()


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize(
    ("changed", "ranks", "told"),
    [({}, 8, "4, which 8 ranks cannot share"), ({"attention_bias": True}, 2, "does not share")],
)
def test_what_ranks_cannot_share_is_refused_before_weights(
    changed: dict[str, Any], ranks: int, told: str, fetching: Fetching
) -> None:
    with_config(fetching, **changed)
    assert told in fetching.refused(loading=structs.replace(RANKS, tensor_parallel=ranks))
    assert no_weights_asked(fetching)


@pytest.mark.usefixtures("asked_here")
def test_numbers_that_are_not_served_are_refused_before_weights(fetching: Fetching) -> None:
    fetching.server.repositories[NAME].parameters = {"F8_E4M3": 7_000_000, "BF16": 145_728}
    assert "weights are stored as F8_E4M3" in fetching.refused(loading=CPU)
    assert no_weights_asked(fetching)


def test_what_need_not_be_served_here_is_fetched_whatever_it_is(fetching: Fetching) -> None:
    with_config(fetching, model_type="mamba")
    assert (fetching.folder() / WEIGHTS).is_file()


def test_a_file_that_plain_http_does_not_bring_is_refused_before_it(fetching: Fetching) -> None:
    fetching.server.repositories[NAME].claims[WEIGHTS] = 60 << 30
    told = fetching.refused(f"{NAME}@main")
    assert f"{WEIGHTS} of {NAME}@main has 60.0 GiB" in told
    assert f"`hf download {NAME} --revision main`" in told
    assert no_weights_asked(fetching)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (WEIGHTS, "has no model.safetensors, only pickles, which can run code"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
    ],
)
def test_a_repository_without_what_is_needed_is_refused_by_its_list(
    missing: str, told: str, fetching: Fetching
) -> None:
    del fetching.server.repositories[NAME].files[missing]
    assert told in fetching.refused()
    assert [each.name for each in fetching.server.requests] == [f"{NAME}@main"]


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (b'{"weight_map": {"x": "gone.safetensors"}}', "names gone.safetensors, which is not"),
        (b'{"weight_map": {"x": "pytorch_model.bin"}}', "lists no safetensors"),
        (b"{}", "lists no safetensors"),
    ],
)
def test_an_index_of_what_is_not_there_is_refused_before_weights(
    index: bytes, told: str, fetching: Fetching
) -> None:
    files = fetching.server.repositories[NAME].files
    del files["model.safetensors"]
    files |= {"model.safetensors.index.json": index}
    assert told in fetching.refused()
    assert no_weights_asked(fetching)


# -- from the Hub ---------------------------------------------------------------------------------


def test_a_gated_model_says_where_its_licence_is(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching.server.repositories[NAME].gated = True
    told = fetching.refused()
    page = f"{fetching.server.url}/{NAME}"
    assert told == (
        f"{NAME} is gated: accept its licence at {page} and set HF_TOKEN to a token of that account"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    told = fetching.refused()
    assert f"accept its licence at {page} with the account whose token is in use" in told
    assert "hf_of_nobody" not in told


@pytest.mark.parametrize("token", [None, "hf_own"])
def test_a_model_that_is_not_there_is_told_like_a_folder_that_is_not(
    token: str | None, fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    told = fetching.refused("models/gone")
    assert told.startswith("no model folder at models/gone, and no model of that name at http")
    assert "HF_TOKEN" in told


def test_a_revision_that_is_not_there_is_told_whatever_is_in_the_cache(fetching: Fetching) -> None:
    fetching.folder()
    told = fetching.refused(f"{NAME}@v9")
    assert told.startswith(f"{NAME} has no revision v9: ")


def test_a_hub_that_cannot_be_reached_is_told(fetching: Fetching) -> None:
    with hub_serving({}) as closed:
        pass
    fetching.server.url = closed.url
    told = fetching.refused()
    assert told.startswith(f"no model folder at {NAME}, and {closed.url} cannot be reached (")
    assert "HF_ENDPOINT" in told


@pytest.mark.parametrize(
    ("status", "told"), [(503, "answers 503"), (403, "check HF_TOKEN"), (200, "HF_ENDPOINT")]
)
def test_a_hub_that_answers_otherwise_is_told(status: int, told: str, fetching: Fetching) -> None:
    fetching.server.status = status
    assert told in fetching.refused()


def test_offline_a_model_that_is_not_in_the_cache_is_told(fetching: Fetching) -> None:
    fetching.offline = True
    told = fetching.refused()
    assert f"nor a whole model of that name in {fetching.cache}" in told
    assert "HF_HUB_OFFLINE" in told
    assert fetching.server.requests == []


# -- on the way -----------------------------------------------------------------------------------


def test_other_bytes_than_the_hub_says_are_thrown_away(fetching: Fetching) -> None:
    fetching.server.wrong.add(WEIGHTS)
    told = fetching.refused()
    assert f"{WEIGHTS} of {NAME} came with the SHA-256 " in told
    assert "thrown away, start again" in told
    assert fetching.partial() is None
    fetching.server.wrong.clear()
    assert (fetching.folder() / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()


def test_wrong_bytes_before_a_break_are_found_after_it(fetching: Fetching) -> None:
    fetching.server.wrong.add(WEIGHTS)
    fetching.server.cuts[WEIGHTS] = [4096] * 20
    fetching.refused()
    fetching.server.wrong.clear()
    fetching.server.cuts.clear()
    assert "came with the SHA-256" in fetching.refused()
    assert (fetching.folder() / WEIGHTS).read_bytes() == (DEMO / WEIGHTS).read_bytes()


def test_a_disk_with_too_little_room_is_told_before_weights(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 20))
    told = fetching.refused()
    assert told.startswith(f"no room for {NAME} in {fetching.cache}: 13.6 MiB are to be fetched")
    assert "1.0 MiB are free" in told
    assert "HF_HOME" in told
    assert no_weights_asked(fetching)


def test_a_disk_that_becomes_full_is_told_and_what_has_come_stays(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        """Takes three megabytes of a file, no more."""

        def __init__(self, stream: BufferedWriter) -> None:
            self._stream = stream

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()

        def write(self, data: bytes) -> None:
            if self._stream.tell() + len(data) > 3 << 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._stream.write(data)

    real = Path.open

    def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        stream = real(path, mode, *more, **named)
        return FullDisk(stream) if mode == "ab" else stream  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", opened)
    told = fetching.refused()
    assert told.startswith(f"no room for {NAME} in {fetching.cache}: make some")
    assert "goes on from there" in told
    partial = fetching.partial()
    assert partial is not None
    there = partial.stat().st_size
    assert 0 < there <= 3 << 20
    monkeypatch.setattr(Path, "open", real)
    fetching.folder()
    assert fetching.server.asked(WEIGHTS)[-1].begin == there


def test_a_cache_that_cannot_be_written_is_told(fetching: Fetching) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    told = explained(denied, HubName(NAME), fetching.hub())
    assert str(told).startswith(f"cannot keep {NAME} in {fetching.cache} (Permission denied): set")
    fetching.cache.write_text("a file in the way")
    assert "HF_HOME" in fetching.refused()
