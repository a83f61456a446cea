"""The application as Ray Serve's configurations name it (``import_path``):
``lexshard.serve_app.build:app``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import BY_KEY, KEYS, ConfigError, config_sources, value_of_text
from lexshard.cluster.joining import JoinError, ask_nodes, two_orders
from lexshard.cluster.models.folders import with_model_folders
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.start.preflight import check_files, check_settings
from lexshard.serve_app.start.readiness import StartupError

# Options of `lexshard serve` that have no place here, and what to do instead.
NOT_HERE = {
    "backend": "Ray Serve runs it: leave it out",
    "address": "the application runs in the cluster that it is deployed to: leave it out",
    "dashboard": "Ray is started by others there: leave it out",
    "host": "Ray Serve listens: set http_options.host in its configuration",
    "port": "Ray Serve listens: set http_options.port in its configuration",
    "api_processes": "every replica is one: set num_replicas of the deployment 'server'",
    "routing": "Ray Serve's own ingress chooses replicas: leave it out",
    "placement_seconds": "Ray Serve waits for room as long as it takes: leave it out",
    "playground_kills": "whether strangers reach the page is not known there: leave it out",
    "ssl_certfile": "Ray Serve listens: set http_options.ssl_certfile in its configuration",
    "ssl_keyfile": "Ray Serve listens: set http_options.ssl_keyfile in its configuration",
    "api_keys": "`serve config` shows args: set LEXSHARD_API_KEYS or api_key_file",
}


def app(args: dict[str, Any]) -> Application:
    """What ``serve run``, ``serve deploy`` and KubeRay's ``serveConfigV2`` start: replicas with an
    engine each (`serve_app.replica`).

    ``args`` are the options of `lexshard serve` by their keys, as in a file of ``--config``; text
    may stand for any value, for ``serve run lexshard.serve_app.build:app KEY=VALUE`` knows nothing
    else. Variables such as ``LEXSHARD_API_KEYS`` of the process that builds are heard; ``args``
    win.

    Raises:
        RayServeException: with one sentence, which `serve status` shows.
    """
    # Seconds: a mistyped option should not wait.
    from lexshard.serve_app.replica import bind_replicas

    try:
        config = page_as_asked(read_args(args, os.environ))
        check_settings(config.model_copy(update={"backend": "ray", "reserve": True}))  # it is
        config = with_model_folders(config, tell)
        check_files(config)
        _check_nodes(config)
        return bind_replicas(config)
    except (ConfigError, StartupError, JoinError, ValueError, OSError) as error:
        raise RayServeException(f"lexshard: {error}") from error


def _check_nodes(config: ServeConfig) -> None:
    """Raises JoinError where replicas on some of the nodes would draw other tokens than on others;
    `serve build` has no nodes to ask."""
    engine = config.engine_configuration
    if engine.dtype == "float32" or engine.device == "cuda" or not ray.is_initialized():
        return
    try:
        nodes = ask_nodes()
    except (JoinError, ray.exceptions.RayError):  # one that is about to go stops no deployment
        return
    complaint = two_orders(nodes, engine.device)
    if complaint is not None:
        raise JoinError(complaint)


def read_args(args: Mapping[str, Any], environment: Mapping[str, str]) -> ServeConfig:
    """The configuration that ``args`` and ``environment`` say, its paths absolute.

    Raises:
        ConfigError: with one line that says what to do.
    """
    given = {key: _value(key, value) for key, value in args.items()}
    sources = config_sources(None, environment, given)
    for key, remedy in NOT_HERE.items():
        if key in given or (key in sources.environment and key != KEYS):
            raise ConfigError(f"option '{key}' has no place here: {remedy}")
    return sources.config().with_absolute_paths()


def page_as_asked(config: ServeConfig) -> ServeConfig:
    """Without a page that was not asked for, and with one that kills nothing: Ray Serve listens
    where it is told to, and nothing here knows that to be loopback."""
    told = {"playground": bool(config.playground), "playground_kills": False}
    return config.model_copy(update=told)


def _value(key: str, value: Any) -> Any:
    option = BY_KEY.get(key)  # an unknown one is told with the others
    if option is None or not isinstance(value, str):
        return value
    return value_of_text(option, value, where=f"option '{key}'")
