"""``lexshard serve``: from flags to a server that runs until it is told to stop."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from actors.configuration import NGRAM
from actors.drafter.checks import check_drafting
from cluster.config import (
    OPTIONS,
    ConfigError,
    Option,
    ServeConfig,
    environment_values,
    load_config,
)
from serve_app.banner import decisions
from serve_app.launch import check_port
from serve_app.readiness import StartupError
from serve_app.server_process import ClusterLostError, StopRequest, serve_until_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags left out leave no trace, so that file and environment can speak."""
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of these options, named with underscores",
    )
    for option in OPTIONS:
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


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; the process's exit code."""
    flags = dict(vars(arguments))
    path = flags.pop("config", None)
    try:
        config = load_config(path, environment_values(os.environ) | flags)
        check(config)
    except (ConfigError, StartupError) as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    print(f"lexshard serve with:\n{decisions(config)}", flush=True)
    stop = StopRequest()
    stop.listen()
    try:
        code = serve_until_stopped(config, stop)
    except ClusterLostError as error:
        print(f"lexshard: {error}; the server has been ended", file=sys.stderr)
        return 1
    if stop.made:
        print("lexshard: stopped", flush=True)
        return 0
    return code


def check(config: ServeConfig) -> None:
    """What can be known to be wrong before anything is started.

    Raises:
        StartupError: no model, draft model or hot vocabulary there, settings that cannot work
            together, or the port is taken.
    """
    try:
        check_drafting(config.engine_configuration)
    except ValueError as error:
        raise StartupError(str(error)) from error
    _check_folder(config.model)
    if config.draft is not None and config.draft != NGRAM:
        _check_folder(config.draft)
    if config.hot_vocabulary is not None and not Path(config.hot_vocabulary).is_file():
        raise StartupError(f"no hot vocabulary at {config.hot_vocabulary}")
    try:
        check_port(config.host, config.port)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}"
        ) from error


def _check_folder(model: str) -> None:
    folder = Path(model)
    if not folder.is_dir():
        raise StartupError(f"no model folder at {model}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartupError(f"{model} is no model folder: it has no {name}")
