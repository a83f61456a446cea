"""What is said of a server's options, before it starts and by ``lexshard config show``."""

from __future__ import annotations

import textwrap
from typing import Any

from lexshard.cluster.config import OPTIONS, ServeConfig
from lexshard.cluster.config_sources import ConfigSources

PAGE_COLUMNS = 100
LABEL_WIDTH = 12
# Of what was set: a long file would leave no room for what was decided.
MOST_LINES = 5
LONGEST_VALUE = 48
PLACES = {"flag": "flags"}


def shown_values(config: ServeConfig) -> dict[str, str]:
    """What is said of every option, by its key. Of secrets it is how many there are."""
    values = config.model_dump(by_alias=True)
    shown: dict[str, str] = {}
    for option in OPTIONS:
        value = values[option.key]
        if option.secret:
            shown[option.key] = f"{len(value)} set" if value else "none: open to all"
        else:
            shown[option.key] = _in_words(value)
    return shown


def _in_words(value: Any) -> str:
    if value in (None, []):
        return "not set"
    return ",".join(value) if isinstance(value, list) else str(value)


def set_options(sources: ConfigSources, config: ServeConfig) -> str:
    """The options of ``config`` that are not what they are by default, by where they were set: at
    most ``MOST_LINES`` lines below the first one."""
    shown = shown_values(config)
    values = config.model_dump(by_alias=True)
    by_place: dict[str, list[str]] = {}
    for option in OPTIONS:
        if values[option.key] != option.default:
            # The flag or the variable of an option is known by its name.
            place = sources.origin(option.key).partition(" ")[0]
            by_place.setdefault(place, []).append(f"{option.key} {_shortened(shown[option.key])}")
    lines: list[str] = []
    for place, told in by_place.items():
        begin = f"{_shortened(sources.path)}: " if place == "file" and sources.path else ""
        # What an option is set to stays on its line.
        text = begin + ", ".join(each.replace(" ", "\N{NO-BREAK SPACE}") for each in told)
        lines += labelled(PLACES.get(place, place), text)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = labelled("", "... and more")
    count = sum(map(len, by_place.values()))
    title = (
        f"lexshard serve: {count} of {len(OPTIONS)} options set (`lexshard config show` has all)"
    )
    return "\n".join([title, *lines])


def _shortened(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"...{value[3 - LONGEST_VALUE :]}"


def labelled(label: str, text: str) -> list[str]:
    """A line of a page, or as many as ``text`` takes."""
    lines = textwrap.wrap(
        text,
        PAGE_COLUMNS,
        initial_indent=f"  {label:<{LABEL_WIDTH}} ",
        subsequent_indent=f"  {'':<{LABEL_WIDTH}} ",
        break_on_hyphens=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
