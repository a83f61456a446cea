"""The options of a server: every source tells what it set, and what is wrong is told at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lexshard.cluster.config import GROUPS, OPTIONS, ServeConfig, configuration_schema
from lexshard.cluster.config_sources import PROCESS_VARIABLES, ConfigError, config_sources
from tests.support.configurations import load_config
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
EXAMPLE = DOCS / "serve.example.yaml"
# What docs/serving.md says of options that decide for themselves where the operator does not.
AUTOMATIC = {
    "on loopback",
    "the folder's name",
    "main",
    "the model's",
    "512, on a GPU 4096",
    "`int8`, `int4`; on a GPU `int8` alone",
    "a tenth of the memory at most",
    "measured",
    "its threads",
    "1 where nodes have GPUs",
    "beside the model, else in the user's cache",
    "none",
}


def written(folder: Path, text: str, name: str = "serve.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return path


# -- sources --------------------------------------------------------------------------------------


def test_every_value_tells_where_it_comes_from(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("third\n")
    keys.chmod(0o600)
    path = written(tmp_path, f"model: a\nport: 1001\nthreads: 1\napi_key_file: {keys}\n")
    environment = {"LEXSHARD_PORT": "1002", "LEXSHARD_THREADS": "2", "LEXSHARD_API_KEYS": "x,y"}
    sources = config_sources(path, environment, {"port": 1003})
    config = sources.config()
    assert (config.port, config.threads, config.api_keys) == (1003, 2, ["x", "y", "third"])
    origins = {option.key: sources.origin(option.key) for option in OPTIONS}
    assert origins.pop("port") == "flag --port"
    assert origins.pop("threads") == "environment LEXSHARD_THREADS"
    assert origins.pop("model") == origins.pop("api_key_file") == f"file {path}"
    assert origins.pop("api_keys") == "environment LEXSHARD_API_KEYS and api_key_file"
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", "unknown option 'prot': did you mean port?"),
        ("kv_cache_bytes: 1", "unknown option 'kv_cache_bytes': did you mean kv_cache_memory?"),
        ("dtype: bfloat", "'dtype': .* not 'bfloat': did you mean bfloat16?"),
        ("tiers: [int9]", "'tiers.0': .* not 'int9': did you mean int8?"),
        ('port: "80"', "'port': .* not '80': write 80 without quotes"),
        ("port: 70000", "'port': .*65535, not 70000 .*: leave it out for 8000"),
        ("threads: yes", "'threads': .* not True .*: leave it out for what is automatic"),
        ("model: 3", "'model': .* not 3"),
        ("port: 1\nport: 2", "'port' is given twice: leave one out"),
        ("draft: {folder: a}", "'draft': .*"),
        ("revision: 2026-13-45", "is not valid YAML: month must be in 1..12"),
        ("threads: !!int abc", "is not valid YAML"),
        ("threads: " + "[" * 5000, "is not valid YAML"),
        ("port: 010", "010 would be 8: write the number that is meant"),
        ("max_waiting_tokens: 12:30", "12:30 would be 750"),
        ("port: 08", "'port': .* not '08': write 8 without quotes"),
        ("host: ''", "'host': "),
        ("api_keys: [cl\u00e9]", "'api_keys.0': .*a key is visible ASCII"),  # encoded in many ways
    ],
)
def test_a_bad_file_is_told_in_one_line_with_key_value_and_remedy(
    text: str, told: str, tmp_path: Path
) -> None:
    base = "" if text.startswith("model") else "model: a\n"
    path = written(tmp_path, base + text + "\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(path, {})
    message = str(refusal.value)
    assert re.search(told, message), message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_a_file_that_others_can_read_holds_no_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "model: a\napi_keys: [sk-1]\n")
    assert load_config(path, {}).api_keys == ["sk-1"]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_config(path, {})


def test_a_key_that_is_no_list_is_refused_beside_a_file_of_keys_too(tmp_path: Path) -> None:
    """Its letters would have been keys."""
    file = written(tmp_path, "sk-1\n", "keys")
    for keys in ("sk-secret", "null", "5"):
        path = written(tmp_path, f"model: a\napi_key_file: {file}\napi_keys: {keys}\n")
        with pytest.raises(ConfigError, match="'api_keys': Input should be a valid list"):
            load_config(path, {})


def test_a_mapping_may_be_merged_into_another(tmp_path: Path) -> None:
    path = written(tmp_path, "<<: {model: a, port: 80}\nport: 81\n")
    assert (load_config(path, {}).model, load_config(path, {}).port) == ("a", 81)


def test_no_message_tells_a_key(tmp_path: Path) -> None:
    secret = "sk-1 and more"
    refused: list[Any] = [
        (written(tmp_path, f"model: a\napi_keys: [{secret}]\n"), {}),
        (None, {"LEXSHARD_API_KEYS": secret}),
    ]
    for path, environment in refused:
        with pytest.raises(ConfigError, match=r"API_KEYS|api_keys") as refusal:
            config_sources(path, environment, {"model": "a"}).config()
        assert "sk-1" not in str(refusal.value)


# -- what is documented ---------------------------------------------------------------------------


def test_the_example_is_complete_valid_and_shows_the_defaults() -> None:
    example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert list(example) == [option.key for option in OPTIONS]
    load_config(EXAMPLE, {})
    jsonschema.validate(example, configuration_schema())
    for option in OPTIONS:
        if not option.required:
            assert example[option.key] == option.default, option.key


@pytest.mark.parametrize(
    "wrong", [{"prot": 1}, {"port": "80"}, {"port": 0}, {"tiers": ["int9"]}, {"model": None}]
)
def test_the_schema_refuses_what_a_server_refuses(wrong: dict[str, Any]) -> None:
    values = {"model": "a"} | wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, configuration_schema())
    with pytest.raises(ConfigError):
        load_config(None, values)


def test_the_schema_takes_a_size_with_a_unit_and_knows_every_option() -> None:
    schema = configuration_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for size in (4096, "4GiB", None):
        jsonschema.validate({"model": "a", "kv_cache_memory": size}, schema)
    described = schema["properties"]
    assert list(described) == [option.key for option in OPTIONS]
    assert all(each["description"] for each in described.values())


def test_every_option_is_in_one_group_and_groups_keep_together() -> None:
    assert len({option.key for option in OPTIONS}) == len(OPTIONS)
    assert {option.group for option in OPTIONS} == set(GROUPS)
    order = [option.group for option in OPTIONS]
    assert order == sorted(order, key=list(GROUPS).index)


def test_files_list_options_under_the_titles_of_their_groups() -> None:
    serving = (DOCS / "serving.md").read_text(encoding="utf-8")
    example = EXAMPLE.read_text(encoding="utf-8")
    for name, title in GROUPS.items():
        table = serving.partition(f"### {title}\n")[2].partition("\n#")[0]
        part = example.partition(f"# -- {title}. -")[2].partition("# -- ")[0]
        for option in OPTIONS:
            here = option.group == name
            assert (f"`{option.flag or option.key}" in _first_cells(table)) == here, option.key
            assert (f"\n{option.key}: " in part) == here, option.key


def _first_cells(table: str) -> str:
    """Without what the other columns say of other options; a name ends with what follows it."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return re.sub(r"`([-a-z_]+)[^`]*`", r"`\1", "".join(cells))


def _documented() -> dict[str, str]:
    """The defaults in docs/serving.md, by flag."""
    found: dict[str, str] = {}
    for line in (DOCS / "serving.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and (cells[0].startswith("`--") or cells[0] == "`api_keys`"):
            names = re.findall(r"`(--[a-z-]+|api_keys)", cells[0])
            values = cells[1].split(", ") if len(names) > 1 else [cells[1]]
            found |= dict(zip(names, values, strict=True))
    return found


def test_documented_defaults_are_those_of_the_code() -> None:
    documented = _documented()
    assert set(documented) == {option.flag or option.key for option in OPTIONS}
    for option in OPTIONS:
        told, default = documented[option.flag or option.key], option.default
        if option.required:
            assert told == "required"
        elif default in (None, []):
            assert told in AUTOMATIC, (option.key, told)
        elif isinstance(default, bool):
            assert told == ("on" if default else "off"), option.key
        else:
            values = default if isinstance(default, list) else [default]
            assert told.replace("`", "") == ", ".join(map(str, values)), option.key


def test_every_variable_that_is_documented_is_known() -> None:
    known = PROCESS_VARIABLES | {option.variable for option in OPTIONS}
    named = {
        (path.name, variable)
        for path in (ROOT / "README.md", *DOCS.glob("*.md"))
        for variable in re.findall(r"LEXSHARD_\w+", path.read_text(encoding="utf-8"))
    }
    assert ("edge.md", "LEXSHARD_CLOUD_KEY") in named
    assert {each for each in named if each[1] not in known} == set()


def test_a_secret_has_no_flag() -> None:
    [secret] = [option for option in OPTIONS if option.secret]
    assert (secret.key, secret.flag) == ("api_keys", None)
    assert all(option.flag for option in OPTIONS if not option.secret)
    assert ServeConfig(model="a").api_keys == []
