"""A configuration as a file and options make it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import config_sources


def load_config(path: str | Path | None, overrides: Mapping[str, Any]) -> ServeConfig:
    """What a file (if any) says, with ``overrides`` laid over it. Raises ConfigError."""
    return config_sources(path, {}, overrides).config()
