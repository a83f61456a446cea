"""``lexshard serve``: from flags to a server that runs until it is told to stop."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import ConfigError
from lexshard.serve_app.commands.option_flags import add_option_flags, given_options
from lexshard.serve_app.observability.logs import print_lines
from lexshard.serve_app.start.preflight import make_room, ready_to_start
from lexshard.serve_app.start.readiness import StartupError
from lexshard.serve_app.start.settings import set_options
from lexshard.serve_app.start.stopping import StopRequest

REFUSALS = (ConfigError, StartupError)
INTERRUPTED = "the same command goes on where it stopped"  # while a model is fetched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    add_option_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM; the process's exit code."""
    sources = given_options(arguments)
    given = sources.config()
    tell = partial(_tell, given)
    config = ready_to_start(given, tell)
    make_room(config.on_ray, tell)
    print_lines(set_options(sources, given), config.log_format)
    stop = StopRequest()
    stop.listen()
    code = _serve(config, stop)
    if stop.made and not code:
        print_lines("lexshard: stopped", config.log_format)
        return 0
    return code


def _tell(config: ServeConfig, text: str) -> None:
    print_lines(f"lexshard: {text}", config.log_format)


def _serve(config: ServeConfig, stop: StopRequest) -> int:
    if config.on_ray:
        from lexshard.serve_app.start.server_process import ClusterLostError, serve_until_stopped

        try:
            return serve_until_stopped(config, stop)
        except ClusterLostError as error:
            text = f"lexshard: {error}; the server has been ended"
            print_lines(text, config.log_format, sys.stderr)
            return 1
    from lexshard.serve_app.start.embedded import serve_embedded

    return serve_embedded(config, stop)
