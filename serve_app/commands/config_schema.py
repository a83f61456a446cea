"""``lexshard config schema``: the JSON schema of configuration files."""

from __future__ import annotations

import argparse
import json

from lexshard.cluster.config import configuration_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the schema; returns the exit status."""
    print(json.dumps(configuration_schema(), indent=2))
    return 0
