"""The measured servers: ours by its flags, other OpenAI-compatible ones by command lines."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OURS = "lexshard"
HOME = "LEXSHARD_HOME"  # where it keeps files of its own
MODEL, DRAFT = "models/lexshard-demo", "models/lexshard-demo-draft"
# A server that inherited them would not look in its own home.
CACHES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR")
PORT = "{port}"  # in command lines: a free port is put there


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server by the command that starts it, in which ``{port}`` stands for a free port.
    ``environment`` are variables of its own."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    def at(self, port: int) -> tuple[str, ...]:
        """The command with its port in place."""
        return tuple(word.replace(PORT, str(port)) for word in self.command)

    def whole_environment(self) -> dict[str, str]:
        """This process's own, but for what is not meant for that server: options of ours that
        the measuring process has set, where this process keeps its compiled kernels, and what would
        show another server our packages: in a clone, the current folder is full of them."""
        hidden = CACHES if self.is_ours else (*CACHES, "PYTHONPATH", "PYTHONSAFEPATH")
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in hidden and (name == HOME or not name.startswith("LEXSHARD_"))
        }
        if not self.is_ours and not Path(self.command[0]).name.startswith("python"):
            # What a command starts in turn with `python -m`, as vLLM does to look at a model.
            kept["PYTHONSAFEPATH"] = "1"
        return kept | dict(self.environment)


def our_server(flags: Sequence[str], environment: Mapping[str, str] | None = None) -> ServerCommand:
    """``lexshard serve`` with ``flags``; where they name no model, the one of ``make serve``."""
    given = list(flags)
    if option_value(given, "--config") is None and option_value(given, "--model") is None:
        given += ["--model", MODEL]
        if option_value(given, "--draft") is None:
            given += ["--draft", DRAFT]
    command = (sys.executable, "-m", "lexshard.serve_app.cli", "serve", *given, "--port", PORT)
    return ServerCommand(OURS, command, environment=environment or {})


def option_value(flags: Sequence[str], option: str) -> str | None:
    """The value of ``--option VALUE`` or ``--option=VALUE``, the last where there are several."""
    value = None
    for word, following in zip(flags, [*flags, ""][1:], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Which servers are measured beside ours, and with which options ours is started."""
    add = parser.add_argument
    add(
        "--against",
        type=_other,
        action="append",
        default=[],
        metavar="NAME='COMMAND'",
        help="another OpenAI-compatible server, started by its command line, in which {port} is "
        "a free port; repeatable",
    )
    add("options", nargs="*", metavar="OPTION", help="after --: options of lexshard serve")


def asked_servers(arguments: argparse.Namespace) -> list[ServerCommand]:
    """Ours first, then the others.

    Raises:
        ValueError: two have one name, there is no such program, or one has no port.
    """
    for each in arguments.against:
        if shutil.which(each.command[0]) is None:
            raise ValueError(f"--against {each.name}: there is no program {each.command[0]}")
        if PORT not in " ".join(each.command):
            raise ValueError(
                f"--against {each.name}: the command line has no {PORT}: it says where to listen"
            )
    servers = [our_server(arguments.options), *arguments.against]
    if len({each.name for each in servers}) < len(servers):
        raise ValueError(f"--against: every server needs a name of its own, and {OURS} is taken")
    return servers


def _other(text: str) -> ServerCommand:
    name, _, line = text.partition("=")
    try:
        command = shlex.split(line)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not name or " " in name or not command:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME='COMMAND LINE'")
    return ServerCommand(name, (str(Path(command[0]).expanduser()), *command[1:]))
