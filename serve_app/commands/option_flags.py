"""The options of a server as flags of a command, and the pages of their ``--help``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, get_args

from lexshard.cluster.config import GROUPS, OPTIONS, Option
from lexshard.cluster.config_sources import BY_KEY, ConfigError, ConfigSources, config_sources

CONFIG = "config"
MODEL = "model"
POSITIONAL = "positional_model"
ALL = "all"
# What people need before they need anything else, by key.
FIRST = (
    "model",
    "served_model_name",
    "host",
    "port",
    "api_key_file",
    "max_model_len",
    "max_batch_size",
    "draft",
    "samplers",
    "shards",
)


def add_option_flags(parser: argparse.ArgumentParser) -> None:
    """``--config`` and a flag per option, in their groups, and a ``--help`` that shows them group
    by group: ``parser`` lets it take the place of its own (``conflict_handler="resolve"``). Flags
    left out leave no trace, so that file and environment can speak."""
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.formatter_class = _PageFormat
    parser.add_argument(
        "-h",
        "--help",
        action=_HelpPage,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        nargs="?",
        choices=(*GROUPS, ALL),
        metavar="GROUP",
        help="this page, a GROUP of options, or all",
    )
    parser.add_argument(
        POSITIONAL,
        default=argparse.SUPPRESS,
        nargs="?",
        metavar="MODEL",
        help="the same as --model",
    )
    parser.add_argument(
        "--config",
        dest=CONFIG,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of options: see lexshard config show",
    )
    for name, title in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in OPTIONS:
            if option.group == name:
                _add_flag(group, option)


def _add_flag(group: Any, option: Option) -> None:
    """To an argument group, which argparse has no public name for. Nothing for what is secret."""
    if option.flag is not None:
        group.add_argument(
            option.flag,
            dest=option.key,
            default=argparse.SUPPRESS,
            help=option.description,
            **_kind_of_flag(option),
        )


def _kind_of_flag(option: Option) -> dict[str, Any]:
    if option.kind is bool and not option.default:
        return {"action": "store_true"}
    if option.kind is bool or bool in get_args(option.kind):  # None is what is automatic
        return {"action": argparse.BooleanOptionalAction}
    placeholder = {int: "N", float: "X", None: "WORD"}[option.number]
    kind: dict[str, Any] = {"metavar": option.metavar or placeholder}
    if option.repeatable:
        kind["action"] = "append"
    if option.number is not None:
        kind["type"] = option.number
    return kind


class _PageFormat(argparse.RawDescriptionHelpFormatter):
    """Most flags on one line with what they are for."""

    def __init__(self, prog: str, **words: Any) -> None:
        super().__init__(prog, max_help_position=32, **words)


class _HelpPage(argparse.Action):
    """Prints what people need first, a group of options, or all of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        for action in parser._actions:
            option = BY_KEY.get(action.dest)
            if action.option_strings and option is not None and values not in (ALL, option.group):
                action.help = argparse.SUPPRESS
        print(parser.format_help() + ("" if values else _first_page(parser.prog)), end="")
        parser.exit()


def _first_page(prog: str) -> str:
    first = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, add_help=False, formatter_class=_PageFormat
    )
    group = first.add_argument_group("what people need first")
    for key in FIRST:
        _add_flag(group, BY_KEY[key])
    groups = [f"  {name:<12} {title}" for name, title in GROUPS.items()]
    half = (len(groups) + 1) // 2
    lines = [
        f"{left:<37}{right}".rstrip()
        for left, right in zip_longest(groups[:half], groups[half:], fillvalue="")
    ]
    begin = f"more, in groups ({prog} --help=GROUP, or --help={ALL}):"
    return "\n".join(["", first.format_help(), begin, *lines, ""])


def given_options(arguments: argparse.Namespace) -> ConfigSources:
    """What the file of ``--config``, this process's environment and the flags say.

    Raises:
        ConfigError: the file cannot be read, a variable of ours is unusable, or two models are
            given.
    """
    given = vars(arguments)
    flags = {key: value for key, value in given.items() if key in BY_KEY}
    if POSITIONAL in given:
        model = given[POSITIONAL]
        if flags.setdefault(MODEL, model) != model:
            raise ConfigError(
                f"two models given, {model} and --model {flags[MODEL]}: leave one out"
            )
    return config_sources(given.get(CONFIG), os.environ, flags)
