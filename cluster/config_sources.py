"""Where options get their values: defaults, then a YAML file, then the environment, then flags.

Unknown names, names given twice and values of the wrong type are errors: a misspelt name must never
be ignored. Every error is one line that names the option, what was given and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from lexshard.cluster.config import OPTIONS, VARIABLE_PREFIX, Option, ServeConfig
from lexshard.cluster.nearest import did_you_mean
from lexshard.cluster.strict_yaml import NOT_YAML, StrictLoader

# What Kubernetes puts there for a service whose name begins with lexshard is none of ours.
SERVICE_VARIABLE = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
BY_KEY = {option.key: option for option in OPTIONS}
KEYS, KEY_FILE = "api_keys", "api_key_file"
# Of the process, not of the server: where its caches are (`kernels.home`), what it compiles for
# (`kernels.processor`), and with which keys `lexshard status` and `lexshard edge` ask.
CLOUD_KEY, OWN_KEY = "LEXSHARD_CLOUD_KEY", "LEXSHARD_API_KEY"
PROCESSOR = "LEXSHARD_CPU"
PROCESS_VARIABLES = frozenset({"LEXSHARD_HOME", PROCESSOR, OWN_KEY, CLOUD_KEY})
# What a server tells its own processes. Ray's workers have it, too, where Serve builds another
# configuration of the application.
OWN_VARIABLES = "LEXSHARD_INGRESS_"  # `cluster.ingress`
# Of `kernels.processor`, which imports numba.
PROCESSORS = ("", "avx2", "avx512", "amx", "vectors")


class ConfigError(ValueError):
    """A configuration that cannot be used, with one line that says why."""


@dataclass(frozen=True, slots=True)
class ConfigSources:
    """What was given, by key of the option: in the ``file`` at ``path``, by the ``environment``
    (see `environment_values`) and by ``flags``. The later one wins."""

    path: str | None = None
    file: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> ServeConfig:
        """The configuration in effect.

        Raises:
            ConfigError: a key of the file is unknown, or a value is missing or unusable.
        """
        values = {**self.file, **self.environment, **self.flags}
        key_file = values.get(KEY_FILE)
        keys = values.get(KEYS, [])
        if isinstance(key_file, str) and isinstance(keys, list):
            values[KEYS] = [*keys, *_read_keys(key_file)]
        if "model" not in values:
            raise ConfigError(
                "no model given: pass a folder or ORG/NAME, or set 'model' in the configuration"
            )
        try:
            return ServeConfig(**values)
        except ValidationError as error:
            problem = error.errors()[0]
            key = str(problem["loc"][0])
            where = f"{self.path}: " if self.origin(key) == self._of_file else ""
            raise ConfigError(where + _complaint(problem)) from error

    @property
    def _of_file(self) -> str:
        return f"file {self.path}"

    def origin(self, key: str) -> str:
        """Where the value of the option ``key`` comes from, in words."""
        option = BY_KEY.get(key)
        if key in self.flags and option is not None:
            origin = f"flag {option.flag}"
        elif key in self.environment and option is not None:
            origin = f"environment {option.variable}"
        elif key in self.file:
            origin = self._of_file
        else:
            origin = "default"
        if key == KEYS and self.origin(KEY_FILE) != "default":
            origin = KEY_FILE if origin == "default" else f"{origin} and {KEY_FILE}"
        return origin


def config_sources(
    path: str | Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> ConfigSources:
    """What the YAML file at ``path`` (None: no file), variables and ``flags`` (by key) say.

    Raises:
        ConfigError: the file cannot be read or a variable of ours is unusable.
    """
    file = {} if path is None else _read_file(Path(os.path.expanduser(path)))
    where = None if path is None else str(path)
    return ConfigSources(where, file, environment_values(environment), flags)


# -- the file -------------------------------------------------------------------------------------


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as stream:
            loaded = yaml.load(stream, StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except NOT_YAML as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}") from error
    if not (isinstance(loaded, dict) and all(isinstance(key, str) for key in loaded)):
        raise ConfigError(f"{path} must hold a mapping of option names to values")
    if loaded.get(KEYS):
        refuse_readable(path, f", which holds {KEYS}")
    return loaded


def _read_keys(path: str) -> list[str]:
    """The lines of a key file but for comments (``#``) and empty ones.

    Raises:
        ConfigError: it cannot be read, or others may read it.
    """
    try:
        file = Path(os.path.expanduser(path))
        lines = file.read_text(encoding="utf-8").splitlines()
        refuse_readable(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the keys in {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no keys: the server would be open to all")
    return keys


def refuse_readable(path: Path, why: str = "") -> None:
    """Raises ConfigError for a file of secrets that others may read, OSError where it is none."""
    if path.stat().st_mode & 0o007:
        raise ConfigError(f"every user of this machine can read {path}{why}: chmod 600 it")


# -- the environment ------------------------------------------------------------------------------


def environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    """The options that variables set, such as ``LEXSHARD_PORT=80``. Commas divide what is
    repeatable.

    Raises:
        ConfigError: a variable of ours is unknown or its value of the wrong type.
    """
    options = {option.variable: option for option in OPTIONS}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable.startswith(OWN_VARIABLES):
            continue
        if _is_of_kubernetes(variable, text):
            continue
        if variable in PROCESS_VARIABLES:
            _check_processor(variable, text)
            continue
        if variable not in options:
            meant = did_you_mean(variable, options)
            raise ConfigError(f"unknown environment variable {variable}{meant}")
        option, where = options[variable], f"environment variable {variable}"
        values[option.key] = value_of_text(option, text, where=where)
    return values


def _check_processor(variable: str, text: str) -> None:
    """Here for its own sentence: what imports kernels would fail in the engine's process."""
    if variable == PROCESSOR and text not in PROCESSORS:
        known = f"it can be {', '.join(PROCESSORS[1:])} or unset"
        raise ConfigError(f"environment variable {variable}: {known}, not {text!r}")


def value_of_text(option: Option, text: str, *, where: str) -> Any:
    """The value that ``text`` stands for. Commas divide what is repeatable.

    Raises:
        ConfigError: it is of the wrong type; ``where`` it stands is told.
    """
    given = text.split(",") if option.repeatable else text
    try:
        return TypeAdapter(option.kind).validate_python(given)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_reason(error.errors()[0], option)}") from error


def _is_of_kubernetes(variable: str, text: str) -> bool:
    return SERVICE_VARIABLE.fullmatch(variable) is not None or (
        variable.endswith("_PORT") and SERVICE_ADDRESS.match(text) is not None
    )


# -- what is told ---------------------------------------------------------------------------------


def _complaint(problem: Any) -> str:
    """One of pydantic's problems with a configuration as a sentence."""
    key = str(problem["loc"][0])
    if key not in BY_KEY:
        return f"unknown option '{key}'{did_you_mean(key, BY_KEY)}"
    name = ".".join(str(part) for part in problem["loc"])
    return f"option '{name}': {_reason(problem, BY_KEY[key])}"


def _reason(problem: Any, option: Option) -> str:
    """Why the value of an option is refused, what it was unless it is secret, and what to do."""
    if option.secret:
        words = "a key is visible ASCII without blanks; 'KEY priority=-5' is all that may follow"
        return f"{problem['msg']} ({words})"
    given, choices = problem["input"], re.findall(r"'([^']+)'", problem["msg"])
    meant = did_you_mean(str(given), choices)
    if meant:
        remedy = meant
    elif isinstance(given, str) and given.isdecimal() and option.number is int:
        remedy = f": write {given.lstrip('0') or 0} without quotes"
    elif option.required or choices:
        remedy = ""
    elif option.default in (None, []):
        remedy = f" ({option.description}): leave it out for what is automatic"
    else:
        remedy = f" ({option.description}): leave it out for {option.default}"
    return f"{problem['msg']}, not {given!r}{remedy}"
