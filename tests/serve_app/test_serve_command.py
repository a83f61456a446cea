"""``lexshard serve``: bad command lines, where options are set, keys, and clients that leave."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import ConfigError, environment_values
from lexshard.cluster.ports import free_port
from lexshard.serve_app.authentication import ApiKeys
from lexshard.serve_app.cli import main, parser_of
from lexshard.serve_app.commands.option_flags import given_options
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.start.preflight import ready_to_start
from lexshard.serve_app.start.readiness import StartupError
from tests.support.configurations import load_config
from tests.support.mock_server import model_folder
from tests.support.real_server import running_scripted_server, wait

pytestmark = pytest.mark.usefixtures("no_options_of_the_machine")


def test_bad_command_lines_end_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(model_folder(tmp_path))
    latin, numbered = tmp_path / "latin.yaml", tmp_path / "numbered.yaml"
    latin.write_bytes(b"model: caf\xe9\n")
    numbered.write_text("model: a\n1: 2\n")
    mistyped = tmp_path / "mistyped.yaml"
    mistyped.write_text("model: a\nthreads: true\n")
    cases = [
        (["serve"], "no model"),
        (["serve", "--model", folder, "--draft", str(tmp_path / "absent")], "no model folder"),
        (["serve", "--model", str(tmp_path)], "has no config.json"),
        (["serve", str(tmp_path / "absent")], "no model folder at"),
        (["serve", "org/absent"], "no model folder at org/absent, nor a whole model"),
        (["serve", folder, "--draft", "org/absent"], "no model folder at org/absent, nor"),
        (["serve", folder, "--model", "org/other"], "two models given"),
        (["serve", folder, "--revision", "v1"], "is a path: leave it out"),
        (["serve", "--model", folder, "--dtype", "int3"], "dtype"),
        (["serve", "--model", folder, "--kv-cache-memory", "lots"], "kv_cache_memory"),
        (["serve", "--config", str(tmp_path / "absent.yaml")], "cannot read"),
        (["serve", "--model", folder, "--kv-cache-memory", "0"], "kv_cache_memory"),
        (["serve", "--model", folder, "--dashboard", "--address", "auto"], "leave it out"),
        (["serve", "--model", folder, "--replicas", "3", "--max-replicas", "2"], "fewer than"),
        (["serve", "--model", folder, "--replicas", "2", "--api-processes", "2"], "leave out"),
        (["serve", "--model", folder, "--replicas", "2", "--pin-threads"], "leave it out"),
        (["serve", "--model", folder, "--routing", "load"], "give --replicas 2"),
        (["serve", "--model", folder, "--target-ongoing-requests", "4"], "give --max-replicas"),
        (["serve", "--model", folder, "--draft-tokens", "3"], "give --draft"),
        (["serve", "--config", str(latin)], "not valid YAML"),
        (["serve", "--config", str(numbered)], "must hold a mapping"),
        (["serve", "--config", str(mistyped)], "threads"),
    ]
    for arguments, expected in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1
    assert main(["frobnicate"]) == 2
    assert main(["--help"]) == 0


# -- one declaration, four ways to set it ----------------------------------------------------------


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: a\nport: 1001\nthreads: 1\nsamplers: 1\n")
    environment = {"LEXSHARD_PORT": "1002", "LEXSHARD_THREADS": "2", "HOME": "/"}
    config = load_config(path, environment_values(environment) | flags("--port", "1003"))
    assert (config.port, config.threads, config.samplers) == (1003, 2, 1)


def test_the_model_may_stand_without_its_flag() -> None:
    for words in (["m"], ["--model", "m"], ["m", "--model", "m"], ["--port", "80", "m"]):
        sources = given_options(parser_of(("serve",)).parse_args(words))
        assert sources.config().model == "m"
        assert sources.origin("model") == "flag --model"


def test_a_tilde_is_the_home_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave it in ``--model=~/NAME``, and nothing else reads a file or a variable."""
    monkeypatch.setenv("HOME", str(tmp_path))
    key_file(tmp_path, "secret\n")
    (tmp_path / "serve.yaml").write_text("api_key_file: ~/keys\n")
    paths = {"model": f"~/{model_folder(tmp_path).name}", "draft": "ngram", "index": "~/new/index"}
    config = load_config("~/serve.yaml", {**paths, "port": free_port()})
    assert config.api_keys == ["secret"]
    found = ready_to_start(config, print)
    assert Path(found.model).parent == tmp_path
    assert (found.draft, found.index) == ("ngram", str(tmp_path / "new" / "index"))
    named = config.model_copy(update={"ssl_certfile": "~/a", "ssl_keyfile": "~/b"})
    assert named.with_absolute_paths().ssl_keyfile == str(tmp_path / "b")
    with pytest.raises(StartupError, match=r"no model folder at /.*/~nobody-here/m"):
        ready_to_start(ServeConfig(model="~nobody-here/m", port=free_port()), print)


@pytest.mark.parametrize("name", ["a b", "a#b", "it's", "a" * 60])
def test_a_temporary_folder_that_sockets_cannot_be_in_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy and the engine would each end with words of their own, of none or of no help."""
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/of/a/user/{name}")
    with pytest.raises(StartupError, match=r"temporary folder /tmp/of/a/user/.*: set TMPDIR"):
        ready_to_start(ServeConfig(model=str(model_folder(tmp_path)), port=free_port()), print)


def test_every_option_can_be_set_everywhere_and_reaches_the_engine() -> None:
    lists = ["--tier", "int4", "--tier", "int8"]
    others = ["--batch-invariant", "--kv-cache-memory", "4GiB", "--max-batch-size", "3"]
    variables = {
        "LEXSHARD_TIERS": "int4,int8",
        "LEXSHARD_API_KEYS": "a,b",
        "LEXSHARD_BATCH_INVARIANT": "true",
        "LEXSHARD_KV_CACHE_MEMORY": "4GiB",
        "LEXSHARD_MAX_BATCH_SIZE": "3",
    }
    config = load_config(None, {"model": "m"} | environment_values(variables))
    keys = environment_values({"LEXSHARD_API_KEYS": "a,b"})  # there is no flag for secrets
    assert config == load_config(None, keys | flags("--model", "m", *lists, *others))
    assert config.api_keys == ["a", "b"]
    engine = config.engine_configuration
    assert (engine.model, engine.tiers, engine.batch_invariant) == ("m", ("int4", "int8"), True)
    assert (engine.kv_cache_bytes, engine.max_running) == (4 * 2**30, 3)
    assert ServeConfig(model="").engine_configuration == EngineConfiguration(model="")


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("LEXSHARD_MAX_BATCH", "3", "LEXSHARD_MAX_BATCH: did you mean LEXSHARD_MAX_BATCH_SIZE?"),
        ("LEXSHARD_PORT", "http", "LEXSHARD_PORT: Input should be a valid integer"),
        ("LEXSHARD_API_KEYS", "a,", "LEXSHARD_API_KEYS: String should match pattern"),
        ("LEXSHARD_TIERS", "int9", "LEXSHARD_TIERS: Input should be 'int8'"),
    ],
)
def test_bad_variables_end_with_one_clear_line(
    variable: str,
    value: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError):
        environment_values(os.environ)
    assert main(["serve", "--model", "m"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_what_kubernetes_says_of_a_service_of_our_name_is_left_alone() -> None:
    variables = {
        "LEXSHARD_PORT": "tcp://10.0.0.1:8000",
        "LEXSHARD_SERVICE_HOST": "10.0.0.1",
        "LEXSHARD_SERVICE_PORT": "8000",
        "LEXSHARD_SERVICE_PORT_HTTP": "8000",
        "LEXSHARD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "LEXSHARD_HEAD_SVC_PORT": "tcp://10.0.0.2:6379",
    }
    assert environment_values(variables) == {}


def flags(*arguments: str) -> dict[str, object]:
    return vars(parser_of(("serve",)).parse_args(arguments))


# -- keys -----------------------------------------------------------------------------------------


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_keys_come_from_a_file_and_say_how_urgent_their_owners_may_be(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# the docs team\nfirst\n\nsecond  priority=-10\n")
    third = environment_values({"LEXSHARD_API_KEYS": "third"})
    config = load_config(None, third | flags("--model", "m", "--api-key-file", path))
    assert config.api_keys == ["third", "first", "second  priority=-10"]
    assert ServeConfig.model_validate_json(config.model_dump_json(by_alias=True)) == config
    keys = ApiKeys(config.api_keys)
    owners = [keys.check(f"Bearer {key}") for key in ("first", "second", "third")]
    assert [owner and owner.lowest_priority for owner in owners] == [0, -10, 0]
    assert len({owner and owner.name for owner in owners}) == 3
    for wrong in ("Bearer second  priority=-10", "Bearer # the docs team", "first", None):
        with pytest.raises(ApiError) as refusal:
            keys.check(wrong)
        assert refusal.value.status == 401


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ("first\n", 0o644, "every user of this machine can read"),
        ("# nothing\n\n", 0o600, "holds no keys"),
        ("two words\n", 0o600, "api_keys"),
        ("key priority=high\n", 0o600, "api_keys"),
    ],
)
def test_a_bad_key_file_ends_with_one_clear_line_that_tells_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, mode: int, told: str
) -> None:
    arguments = ["serve", "--model", "m", "--api-key-file", key_file(tmp_path, text, mode)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert "two words" not in error
    assert main(["serve", "--model", "m", "--api-key-file", str(tmp_path / "absent")]) == 2
    assert "cannot read the keys" in capsys.readouterr().err


# -- on Ray Serve ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_that_leaves_is_forgotten_whatever_headers_it_sent(tmp_path: Path) -> None:
    """Ray Serve would hear one that says nobody is to watch for it."""
    headers = {"Authorization": "Bearer secret", "x-request-disconnect-disabled": "?1"}
    with running_scripted_server(tmp_path, "ray", api_keys=["secret"]) as server:
        url = f"{server.url}/v1/completions"
        for streaming in (True, False):
            body = {"prompt": "a", "max_tokens": 2000, "stream": streaming}
            with (
                suppress(httpx.ReadTimeout),
                httpx.stream("POST", url, json=body, headers=headers, timeout=2) as response,
            ):
                assert streaming
                next(response.iter_lines())
        left = "POST /v1/completions status=499"
        wait(
            lambda: server.metric("lexshard_admitted_sequences") == 0, 5, "their places to be free"
        )
        wait(lambda: server.log.read_text().count(left) == 2, 30, "both to be told as left")
