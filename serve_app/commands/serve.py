"""``lexshard serve``: from flags to a server that runs until it is told to stop."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.config import (
    OPTIONS,
    ConfigError,
    Option,
    ServeConfig,
    environment_values,
    load_config,
)
from serve_app.banner import banner, decisions
from serve_app.launch import check_port, running_server

POLL_SECONDS = 0.5


class StartupError(Exception):
    """The server cannot start, with one line that says why."""


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
    if option.is_whole_number:
        kind["type"] = int
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
    stop_on_signals()
    print(f"lexshard serve with:\n{decisions(config)}", flush=True)
    try:
        serve_until_stopped(config)
    except KeyboardInterrupt:
        print("lexshard: stopped", flush=True)
        return 0
    except StartupError as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 1
    return 0


def stop_on_signals() -> None:
    """Makes the first SIGINT or SIGTERM a KeyboardInterrupt; shutting down ignores further ones."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def check(config: ServeConfig) -> None:
    """What can be known to be wrong before anything is started.

    Raises:
        StartupError: no model or hot vocabulary there, or the port is taken.
    """
    folder = Path(config.model)
    if not folder.is_dir():
        raise StartupError(f"no model folder at {config.model}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartupError(f"{config.model} is no model folder: it has no {name}")
    if config.hot_vocabulary is not None and not Path(config.hot_vocabulary).is_file():
        raise StartupError(f"no hot vocabulary at {config.hot_vocabulary}")
    try:
        check_port(config.host, config.port)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}"
        ) from error


def serve_until_stopped(config: ServeConfig) -> None:
    """Raises:
    StartupError: the server or its engine could not start.
    KeyboardInterrupt: it was told to stop; everything has been shut down.
    """
    print("starting Ray and the engine ...", flush=True)
    try:
        with running_server(config) as handle:
            stop_on_signals()  # again: starting Ray has put its own handler there
            wait_until_ready(config)
            information = handle.information.remote().result()
            has_chat = handle.has_chat_template.remote().result()
            print(banner(config, information, has_chat), flush=True)
            while True:
                signal.pause()
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise StartupError(f"the server could not start: {lines[-1].strip()}") from error


def wait_until_ready(config: ServeConfig) -> None:
    """Polls ``/health``, telling every new reason for waiting.

    Raises:
        StartupError: the engine will never be ready.
    """
    told = ""
    while True:
        status, reason, hopeful = _health(config)
        if status == 200:
            return
        if not hopeful:
            raise StartupError(reason)
        if reason != told:
            print(reason, flush=True)
            told = reason
        time.sleep(POLL_SECONDS)


def _health(config: ServeConfig) -> tuple[int, str, bool]:
    """Status, reason, and whether waiting makes sense."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    connection = http.client.HTTPConnection(host, config.port, timeout=10)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = json.loads(response.read())
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        return 0, f"not reachable yet: {error}", True
    finally:
        connection.close()
    if response.status == 200:
        return 200, "", True
    return response.status, body["error"]["message"], "Retry-After" in response.headers
