"""The options of a server as flags of a command."""

from __future__ import annotations

import argparse
import os
from typing import Any

from cluster.config import OPTIONS, Option
from cluster.config_sources import ConfigSources, config_sources

CONFIG = "config"


def add_option_flags(parser: argparse.ArgumentParser) -> None:
    """``--config`` and a flag per option. Flags left out leave no trace, so that file and
    environment can speak."""
    parser.add_argument(
        "--config",
        dest=CONFIG,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of these options, named with underscores",
    )
    for option in OPTIONS:
        if option.flag is not None:
            parser.add_argument(
                option.flag,
                dest=option.key,
                default=argparse.SUPPRESS,
                help=option.description,
                **_kind_of_flag(option),
            )


def _kind_of_flag(option: Option) -> dict[str, Any]:
    if option.kind is bool:
        return {"action": "store_true"}
    kind: dict[str, Any] = {"metavar": option.metavar}
    if option.repeatable:
        kind["action"] = "append"
    if option.number is not None:
        kind["type"] = option.number
    return kind


def given_options(arguments: argparse.Namespace) -> ConfigSources:
    """What the file of ``--config``, this process's environment and the flags say.

    Raises:
        ConfigError: the file cannot be read or a variable of ours is unusable.
    """
    given = vars(arguments)
    keys = {option.key for option in OPTIONS}
    flags = {key: value for key, value in given.items() if key in keys}
    return config_sources(given.get(CONFIG), os.environ, flags)
