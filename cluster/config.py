"""The configuration of a server: defaults, then a YAML file, then command-line flags.

Unknown keys and values of the wrong type are errors: a misspelt key must never be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from actors.configuration import DEFAULT_TIERS

# An empty key would open the server to everyone who sends an empty one.
Name = Annotated[str, Field(pattern=r"\S")]


class ConfigError(ValueError):
    """A configuration that cannot be used, with one line that says why."""


class ServeConfig(BaseModel):
    """Everything ``lexshard serve`` can be told.

    ``kv_cache_memory`` is in bytes or a string like ``4GiB``. ``max_batch_size`` bounds the
    sequences of one engine step; ``max_running_requests`` the sequences admitted at all, and
    ``max_waiting_tokens`` their prompt tokens that still wait to be computed. 0 ``samplers`` decide
    in the engine's own thread.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    served_model_name: list[Name] = Field(default_factory=list)
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    kv_cache_memory: ByteSize | None = Field(default=None, gt=0)
    threads: int | None = Field(default=None, ge=1)
    body: Literal["auto", "fused", "general"] = "auto"
    fast_prefill: bool = False
    head: Literal["auto", "certified", "paper", "dense"] = "auto"
    tiers: list[Literal["int8", "int4", "int4-dither", "1-bit"]] = Field(
        default_factory=lambda: list(DEFAULT_TIERS), min_length=1
    )
    index: str | None = None
    samplers: int = Field(default=0, ge=0)
    sampler_threads: int = Field(default=1, ge=1)
    sampler_placement: Literal["threads", "processes", "ray"] = "processes"
    hot_vocabulary: str | None = None

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_keys: list[Name] = Field(default_factory=list)
    max_batch_size: int = Field(default=64, ge=1)
    max_running_requests: int = Field(default=256, ge=1)
    max_waiting_tokens: int = Field(default=131_072, ge=1)
    max_requests_per_client: int | None = Field(default=None, ge=1)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use: the given ones, else the name of the model's folder."""
        return tuple(self.served_model_name) or (Path(self.model).resolve().name,)


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
    if "model" not in values:
        raise ConfigError("no model given: pass --model FOLDER or set 'model' in the configuration")
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        given = "" if problem["type"] == "missing" else f", not {problem['input']!r}"
        raise ConfigError(f"option '{name}': {problem['msg']}{given}") from error
