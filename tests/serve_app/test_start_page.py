"""What people see first: the lines before a server starts, its banner, and ``--help``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

from lexshard.cluster.config import GROUPS, OPTIONS, Option, ServeConfig
from lexshard.cluster.config_sources import config_sources
from lexshard.serve_app.cli import main
from lexshard.serve_app.commands.option_flags import FIRST
from lexshard.serve_app.start.banner import banner, base_url
from lexshard.serve_app.start.settings import set_options
from tests.support.mock_engine import MockEngine

pytestmark = pytest.mark.usefixtures("no_options_of_the_machine")

LINES, COLUMNS = 30, 100
Captured = pytest.CaptureFixture[str]
INFORMATION = asdict(MockEngine().information)
TIMINGS = [
    ("one", 1, "dense-fp32", 0.564),
    ("one", 1, "int8", 0.4),
    ("one", 1, "int4", 0.47),
    ("one", 64, "int8", 25.0),
    ("several", 1, "int8", 1.5),
]
# What an engine with everything says of itself.
RICH = INFORMATION | {
    "model": "/srv/models/of/a/long/name/Some-Large-Instruct-Model-70B",
    "parameters": 70_553_706_496,
    "device": "cuda:0",
    "thread_choices": [(1, 1), (4, 2), (16, 4), (32, 8)],
    "thread_timings": [(1, 1, 1.34), (1, 2, 1.6), (16, 1, 5.27), (16, 2, 3.39)],
    "accelerator": "NVIDIA H200, 139.8 GiB (97.3 left); CUDA graphs of steps of 1, 2, 4, 8, 16, "
    "32 and 64 rows; attention by FlashInfer",
    "head": "certified (int8, dense-fp32 from 16 rows on; for top-k int8, int4 from 2 rows on, "
    "dense-fp32 from 32 rows on), on the GPU",
    "decisions": "beside the forward pass by 4 samplers in Ray actors, 2 threads each",
    "drafts": "Some-Small-Instruct-Model-1B (static), 0 to 5 tokens ahead, same-token verification",
    "head_timings": TIMINGS,
}


def other_value(option: Option) -> Any:
    """One that is not the default, long where it may be."""
    kinds = get_args(option.kind)
    if option.kind is bool:
        return not option.default
    if option.number is not None:
        return 1.0 if option.number is float else 64
    if kinds and isinstance(kinds[0], str):
        return next(kind for kind in kinds if kind != option.default)
    if option.repeatable:
        return ["a-name-of-some-length", "another-name"]
    return f"/srv/of/a/long/name/for/a/folder/with-its-{option.key}"


OTHERS = {
    "tiers": ["int4-dither"],
    "cors_origins": ["https://app.example"],
    "kv_cache_memory": "4GiB",
    "max_batch_size": 32,
    "playground": True,
    "playground_kills": True,
    "max_body_bytes": 4096,
    "host": "0.0.0.0",
    "root_path": "/llm",
    "tool_format": "hermes",
    "score_labels": ["yes", "no"],
    "otlp_traces_endpoint": "http://collector.example:4318/v1/traces",
}
EVERYTHING = {
    option.key: OTHERS.get(option.key) or other_value(option)
    for option in OPTIONS
    if option.key != "api_key_file"  # read at once
}


def test_start_and_banner_fit_one_screen() -> None:
    for given, information in (({"model": "m"}, INFORMATION), (EVERYTHING, RICH)):
        sources = config_sources(None, {}, given)
        config = sources.config()
        page = set_options(sources, config) + "\n" + banner(config, information, True)
        lines = page.splitlines()
        assert len(lines) <= LINES, page
        assert max(map(len, lines)) <= COLUMNS, page


def test_only_what_was_set_is_said_before_a_start_and_where(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    # The host is the default one, which goes without saying.
    path.write_text("model: a\nshards: 2\nhost: 127.0.0.1\nthreads: 1\n")
    environment = {"LEXSHARD_THREADS": "2", "LEXSHARD_TIERS": "int8"}
    sources = config_sources(str(path), environment, {"port": 9000, "served_model_name": ["b"]})
    title, *lines = set_options(sources, sources.config()).splitlines()
    assert title.startswith(f"lexshard serve: 6 of {len(OPTIONS)} options set")
    told = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert told["flags"] == "served_model_name b, port 9000"
    assert told["environment"] == "threads 2, tiers int8"
    assert told["file"].endswith("serve.yaml: model a, shards 2")
    assert len(told) == 3


def test_the_banner_says_how_the_server_runs_and_how_to_get_the_other_way() -> None:
    plain = banner(ServeConfig(model="m"), INFORMATION, has_chat=False)
    assert "runs         in plain processes" in plain
    assert "`make cluster`" in plain
    on_ray = banner(ServeConfig(model="m", shards=2), INFORMATION, has_chat=False)
    assert "runs         on Ray" in on_ray
    assert "`make serve`" in on_ray


def test_an_option_stays_on_the_line_of_its_value_and_what_is_left_out_is_said() -> None:
    sources = config_sources(None, {}, EVERYTHING)
    lines = set_options(sources, sources.config()).splitlines()
    assert "and more" in lines[-1]
    for line in lines[2:-1]:
        words = line.strip().rstrip(",").split(", ")
        assert all(" " in each for each in words), line


def test_neither_page_tells_a_secret() -> None:
    environment = {"LEXSHARD_API_KEYS": "sk-first,sk-second"}
    sources = config_sources(None, environment, {"model": "m"})
    config = sources.config()
    page = set_options(sources, config) + banner(config, INFORMATION, has_chat=False)
    assert "api_keys 2 set" in page
    assert "sk-" not in page


def test_the_banner_tells_a_choice_in_half_a_line_and_no_table() -> None:
    config = ServeConfig(model="mock")
    plain = banner(config, INFORMATION, has_chat=False)
    assert "milliseconds" not in plain + banner(config, RICH, has_chat=False)
    [head] = [line for line in plain.splitlines() if line.startswith("  head ")]
    assert head.endswith("dense, 264 tokens")
    timed = banner(config, INFORMATION | {"head_timings": TIMINGS}, has_chat=False)
    assert "264 tokens; int8 0.40 ms per token, int4 0.47, dense-fp32 0.56\n" in timed
    threads = INFORMATION | {"thread_choices": [(1, 1), (16, 2)]}
    assert "cpu, 1 thread, 2 from 16 rows on\n" in banner(config, threads, has_chat=False)


def test_the_banner_tells_of_the_page_where_there_is_one() -> None:
    for given, told in (({}, True), ({"host": "0.0.0.0"}, False), ({"playground": False}, False)):
        config = ServeConfig(model="mock", port=9000, **given)
        page = banner(config, INFORMATION, has_chat=False)
        assert ("http://127.0.0.1:9000/\n" in page) == told


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("a.example", "a.example")],
)
def test_the_address_that_is_told_can_be_asked(host: str, told: str) -> None:
    assert base_url(ServeConfig(model="mock", host=host)) == f"http://{told}:8000"


# -- help -----------------------------------------------------------------------------------------


def helped(capsys: Captured, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100])
def test_help_is_one_screen_with_what_people_need_first(
    columns: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    page = helped(capsys, "serve", "--help")
    assert len(page.splitlines()) <= LINES, page
    assert max(map(len, page.splitlines())) <= columns
    assert len(FIRST) == 10
    shown = {option.key for option in OPTIONS if f"  {option.flag} " in page}
    assert shown == set(FIRST)
    assert all(f"  {name} " in page and title in page for name, title in GROUPS.items())


def test_help_of_a_group_shows_its_options_and_help_of_all_shows_each_once(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    flags = {option.flag: option.group for option in OPTIONS if option.flag is not None}
    everything = helped(capsys, "serve", "--help=all").splitlines()
    begins = [line.split()[0].rstrip(",") for line in everything if line.startswith("  --")]
    assert sorted(begins) == sorted([*flags, "--config"])
    for name, title in GROUPS.items():
        page = helped(capsys, "serve", f"--help={name}").splitlines()
        assert f"{title}:" in page
        begins = [line.split()[0].rstrip(",") for line in page if line.startswith("  --")]
        assert begins == ["--config", *(flag for flag, group in flags.items() if group == name)]


def test_help_of_a_command_with_options_of_its_own_shows_these_too(capsys: Captured) -> None:
    for arguments in (["-h"], ["--help=head"]):
        assert "--nodes NODE" in helped(capsys, "topology", "plan", *arguments)
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help=heads"])
    assert end.value.code == 2
    assert "'speculation'" in capsys.readouterr().err
