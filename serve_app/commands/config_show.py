"""``lexshard config show``: the configuration in effect, and where each value comes from."""

from __future__ import annotations

import argparse
import json

from lexshard.cluster.config import GROUPS, OPTIONS
from lexshard.cluster.config_sources import ConfigError
from lexshard.serve_app.commands.option_flags import add_option_flags, given_options
from lexshard.serve_app.start.settings import shown_values

REFUSALS = (ConfigError,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``lexshard serve``, for which it answers."""
    parser.add_argument("--json", action="store_true", help="as JSON: value and origin by option")
    add_option_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every option, group by group; returns the exit status."""
    sources = given_options(arguments)
    config = sources.config()
    shown = shown_values(config)
    origins = {option.key: sources.origin(option.key) for option in OPTIONS}
    if arguments.json:
        values = config.model_dump(mode="json", by_alias=True)
        values |= {option.key: shown[option.key] for option in OPTIONS if option.secret}
        described = {key: {"value": values[key], "from": origins[key]} for key in shown}
        print(json.dumps(described, indent=2))
        return 0
    width = max(map(len, shown.values()))
    for name, title in GROUPS.items():
        print(title)
        for key in (option.key for option in OPTIONS if option.group == name):
            print(f"  {key:<24} {shown[key]:<{width}}  {origins[key]}")
    return 0
