"""``lexshard config check``: is this a configuration that a server can start with here?"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lexshard.cluster.config_sources import ConfigError, config_sources
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.start.preflight import ready_to_start
from lexshard.serve_app.start.readiness import StartupError

REFUSALS = (ConfigError, StartupError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file of options")


def run(arguments: argparse.Namespace) -> int:
    """Check the file, with what the environment lays over it; returns the exit status."""
    sources = config_sources(arguments.file, os.environ, {})
    ready_to_start(sources.config(), tell, weights=False)
    changed = f", {len(sources.environment)} by the environment" if sources.environment else ""
    print(f"{arguments.file} is valid: {len(sources.file)} options set{changed}")
    return 0
