"""The options of a server: defaults, then a YAML file, then the environment, then flags.

Each is declared once: those of the engine in ``EngineConfiguration``, those of the server as fields
of ``ServeConfig``. ``OPTIONS`` is what the file, the environment and the command line read there.
Unknown names and values of the wrong type are errors: a misspelt name must never be ignored.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import yaml
from pydantic import ByteSize, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from actors.configuration import EngineConfiguration
from actors.setting import settings_of

VARIABLE_PREFIX = "LEXSHARD_"
# What Kubernetes puts there for a service whose name begins with lexshard is none of ours.
SERVICE_VARIABLE = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")

Name = Annotated[str, Field(pattern=r"\S")]
# An empty key would open the server to everyone who sends an empty one.
Key = Annotated[str, Field(pattern=r"^\S+( +priority=-?\d{1,9})?$")]


class ConfigError(ValueError):
    """A configuration that cannot be used, with one line that says why."""


def option(
    default: Any,
    description: str,
    metavar: str | None = None,
    flag: str | None = None,
    **rules: Any,
) -> Any:
    """A field of ``ServeConfig``.

    Its key is the ``alias`` among the ``rules`` (which are pydantic's), else its name. ``flag`` and
    ``metavar`` are the command line's words where the key does not give them.
    """
    words: dict[str, Any] = {"metavar": metavar, "flag": flag}
    return Field(default, description=description, json_schema_extra=words, **rules)


STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


def _engine_options() -> dict[str, Any]:
    """The fields of ``ServeConfig`` that ``EngineConfiguration`` declares."""
    kinds: dict[str, Any] = get_type_hints(EngineConfiguration)
    defaults: dict[str, Any] = {item.name: item.default for item in fields(EngineConfiguration)}
    options: dict[str, Any] = {}
    for name, told in settings_of(EngineConfiguration).items():
        kind, default = kinds[name], defaults[name]
        rules: dict[str, Any] = {"alias": told.key} if told.key else {}
        if told.least is not None:
            rules["ge"] = told.least
        if get_origin(kind) is tuple:
            kind, default = types.GenericAlias(list, get_args(kind)[0]), list(default)
            rules["min_length"] = 1
        if told.in_bytes:
            kind = ByteSize | None
        value = ... if default is MISSING else default
        options[name] = (kind, option(value, told.description, told.metavar, told.flag, **rules))
    return options


EngineOptions: Any = create_model("EngineOptions", __config__=STRICT, **_engine_options())


class ServeConfig(EngineOptions):
    """Everything ``lexshard serve`` can be told: the settings of its engine, under the names they
    have in ``EngineConfiguration``, which declares them and says more, and those of the server.

    ``max_running`` bounds the sequences of one engine step; ``max_running_requests`` the sequences
    admitted at all, and ``max_waiting_tokens`` their prompt tokens that still wait to be computed.
    """

    served_model_name: list[Name] = option([], "name for clients; repeatable", metavar="NAME")
    host: str = option("127.0.0.1", "address to listen on (default 127.0.0.1)")
    port: int = option(8000, "port to listen on (default 8000)", ge=1, le=65535)
    api_processes: int = option(
        1, "processes that speak HTTP and tokenise, before one engine", metavar="N", ge=1, le=64
    )
    api_keys: list[Key] = option(
        [],
        "repeatable; 'KEY priority=-5' lets its owner go as far before the default (shows in the "
        "list of processes: better use a file or the environment)",
        metavar="KEY",
        flag="--api-key",
    )
    api_key_file: str | None = option(None, "more keys, one a line", metavar="FILE")
    max_running_requests: int = option(256, "sequences admitted at once", metavar="N", ge=1)
    max_waiting_tokens: int = option(131_072, "prompt tokens that may wait", metavar="N", ge=1)
    max_requests_per_client: int | None = option(
        None, "open requests of one client", metavar="N", ge=1
    )
    max_body_bytes: int = option(
        16 * 1024 * 1024, "largest body of a request", metavar="BYTES", ge=1024
    )
    shutdown_grace_seconds: int = option(
        5, "time for open streams to end when the server is told to", metavar="N", ge=0
    )

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use: the given ones, else the name of the model's folder."""
        return tuple(self.served_model_name) or (Path(self.model).resolve().name,)

    @property
    def engine_configuration(self) -> EngineConfiguration:
        """The options that are the engine's; what is no option keeps the engine's default."""
        settings = self.model_dump(include=set(settings_of(EngineConfiguration)))
        settings["tiers"] = tuple(dict.fromkeys(self.tiers))
        return EngineConfiguration(**settings)


@dataclass(frozen=True, slots=True)
class Option:
    """A field of ``ServeConfig`` as it can be set: by a ``key`` of the file, a ``variable`` of the
    environment or a ``flag``. ``kind`` is the type of its value; None may be among its choices."""

    key: str
    variable: str
    flag: str
    metavar: str | None
    description: str
    kind: Any

    @property
    def repeatable(self) -> bool:
        return get_origin(self.kind) is list

    @property
    def number(self) -> type[int] | type[float] | None:
        """The type of a number; None where the value is none."""
        kinds = (self.kind, *get_args(self.kind))
        return int if int in kinds else float if float in kinds else None


def _options() -> tuple[Option, ...]:
    options: list[Option] = []
    for name, field in ServeConfig.model_fields.items():
        key = field.alias or name
        words: Any = field.json_schema_extra
        options.append(
            Option(
                key=key,
                variable=VARIABLE_PREFIX + key.upper(),
                flag=words["flag"] or "--" + key.replace("_", "-"),
                metavar=words["metavar"],
                description=field.description or "",
                kind=field.annotation,
            )
        )
    return tuple(options)


OPTIONS = _options()


def environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that variables set, such as ``LEXSHARD_PORT=80``. Commas divide what is
    repeatable.

    Raises:
        ConfigError: a variable of ours is unknown or its value of the wrong type.
    """
    options = {option.variable: option for option in OPTIONS}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or _is_of_kubernetes(variable, text):
            continue
        if variable not in options:
            [nearest] = get_close_matches(variable, options, n=1, cutoff=0.0)
            raise ConfigError(f"unknown environment variable {variable}: did you mean {nearest}?")
        option = options[variable]
        given = text.split(",") if option.repeatable else text
        try:
            values[option.key] = TypeAdapter(option.kind).validate_python(given)
        except ValidationError as error:
            problem = error.errors()[0]
            reason = f"{problem['msg']}, not {problem['input']!r}"
            raise ConfigError(f"environment variable {variable}: {reason}") from error
    return values


def _is_of_kubernetes(variable: str, text: str) -> bool:
    return SERVICE_VARIABLE.fullmatch(variable) is not None or (
        variable.endswith("_PORT") and SERVICE_ADDRESS.match(text) is not None
    )


def load_config(path: str | Path | None, overrides: Mapping[str, Any]) -> ServeConfig:
    """Reads a YAML file (if any) and lays ``overrides`` over it.

    Raises:
        ConfigError: the file cannot be read, holds an unknown key, or a value is unusable.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path} is not valid YAML: {reason}") from error
        if not (isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)):
            raise ConfigError(f"{path} must hold a mapping of option names to values")
        values.update(loaded)
    values.update(overrides)
    if isinstance(values.get("api_key_file"), str):
        values["api_keys"] = [*values.get("api_keys", []), *_read_keys(values["api_key_file"])]
    if "model" not in values:
        raise ConfigError("no model given: pass --model FOLDER or set 'model' in the configuration")
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        secret = problem["loc"][:1] == ("api_keys",)
        given = "" if problem["type"] == "missing" or secret else f", not {problem['input']!r}"
        raise ConfigError(f"option '{name}': {problem['msg']}{given}") from error


def _read_keys(path: str) -> list[str]:
    """The lines of a key file but for comments (``#``) and empty ones.

    Raises:
        ConfigError: it cannot be read, or others may read it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        mode = Path(path).stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys in {path}: {error}") from error
    if mode & 0o007:
        raise ConfigError(f"everybody on this machine can read {path}: chmod 600 it")
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no keys: the server would be open to all")
    return keys
