"""The ``lexshard`` command. Each subcommand is a module with ``add_arguments`` and ``run``, or one
for each, imported only when it is asked for. What it lists in ``REFUSALS`` is told in one line, and
with the sentence ``INTERRUPTED`` that it has been interrupted."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple, NoReturn

from lexshard.cluster.nearest import did_you_mean


class Command(NamedTuple):
    """A subcommand: what it does, the module that has its ``run``, and the module that has its
    ``add_arguments``, where that is another one (because what runs takes seconds to import)."""

    text: str
    module: str
    options: str | None = None


OF_SERVERS = {
    "serve": "serve a model over an OpenAI-compatible API",
    "edge": "draft on this device what a server verifies",
    "replay": "make replies again from their receipts: are they what these say?",
    "status": "who does what in a running server",
    "completion": "print what makes a shell complete this command",
    "config show": "show the configuration in effect, and where each value comes from",
    "config check": "check a configuration file without starting anything",
    "config schema": "print the JSON schema of configuration files, for editors",
    "topology plan": "print what would go where before anything starts",
    "cluster check": "check a file of `ray up` without starting anything",
    "index build": "build the vocabulary index of a model",
    "index show": "report what an index file holds",
    "hotset build": "choose the tokens that samplers look at first",
    "hotset show": "report what a hot vocabulary holds",
}
OF_BENCHES = {
    "engine": "measure the engine without HTTP",
    "head": "measure the output head beside dense ones",
    "draft": "count the guesses that stand, by head",
    "sampler": "measure the sampler beside vLLM's",
    "verify": "measure the verification of drafts",
    "shards": "measure a head in several processes",
    "serve": "put any OpenAI endpoints under the same load, by turns",
    "rest": "measure what a server costs at rest",
    "edge": "measure texts through a thin link",
    "schemas": "hold real schemas token by token, and measure outputs under them",
    "start": "measure a start to the first token, also after a kill",
    "vllm-plugin": "measure vLLM with the certified head beside vLLM as it is",
}
BENCHES = "lexshard.loadtest.bench"
WITH_THEIR_OPTIONS = ("rest", "start")  # in the module that runs

COMMANDS: dict[tuple[str, ...], Command] = {
    tuple(name.split()): Command(text, f"lexshard.serve_app.commands.{name.replace(' ', '_')}")
    for name, text in OF_SERVERS.items()
}
for _name, _text in OF_BENCHES.items():
    _module = _name.replace("-", "_")
    _options = None if _name in WITH_THEIR_OPTIONS else f"{BENCHES}.options.{_module}"
    COMMANDS["bench", _name] = Command(_text, f"{BENCHES}.{_module}", _options)
COMMANDS["edge",] = Command(
    OF_SERVERS["edge"], "lexshard.serve_app.edge.server", "lexshard.serve_app.commands.edge"
)
COMMANDS["chat",] = Command("talk to a model that a server has", "lexshard.serve_app.terminal.chat")
COMMANDS["complete",] = Command(
    "let a model that a server has go on with a text", "lexshard.serve_app.terminal.complete"
)
COMMANDS["report",] = Command(
    "a page with plots from the files of --json", "lexshard.loadtest.report.command"
)
COMMANDS["chaos",] = Command(
    "attack a server of its own: does it keep its word?", "lexshard.loadtest.chaos.command"
)


def usage(group: str | None = None) -> str:
    """What commands there are, or those of a ``group`` of them."""
    lines = [
        f"  lexshard {' '.join(words):<14} {command.text}"
        for words, command in COMMANDS.items()
        if group in (None, words[0])
    ]
    name = "COMMAND" if group is None else f"{group} COMMAND"
    return "\n".join(
        [f"usage: lexshard {name} [options]", "", *lines, "", "--help after a command tells more."]
    )


class CommandParser(argparse.ArgumentParser):
    """One that refuses in one line, and names the option that was meant."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        for word in itertools.takewhile("--".__ne__, args):
            name = word.partition("=")[0]
            # As argparse does, take a word with a blank in it for a value.
            if (
                name.startswith("--")
                and name not in self._option_string_actions
                and " " not in word
            ):
                self.error(
                    f"unknown option {name}{did_you_mean(name, self._option_string_actions)}"
                )
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help tells its options)\n")


def parser_of(words: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options of one of ``COMMANDS``."""
    command = COMMANDS[words]
    # Half a name might be that of an option of tomorrow. A command may tell more with --help.
    parser = CommandParser(
        f"lexshard {' '.join(words)}",
        description=command.text,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    importlib.import_module(command.options or command.module).add_arguments(parser)
    return parser


# As a shell tells of a program that SIGPIPE ended.
READER_GONE = 141
HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w")):
        if getattr(sys, name) is None:  # whoever started this has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # What is left in its buffer must not be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader, `head` say, has read enough
            return READER_GONE
        print(f"lexshard: no more can be written: {error.strerror}", file=sys.stderr)
        return 1


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in HELP:
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(version("lexshard"))
        return 0
    for words, command in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            try:
                given = parser_of(words).parse_args(arguments[len(words) :])
                return _run(command, given)
            except ModuleNotFoundError as error:
                package = (error.name or "").partition(".")[0]
                if package in ("", "lexshard"):
                    raise
                told = f"needs {package}, which `pip install '.[serve]'` in a checkout brings"
                print(f"lexshard {' '.join(words)}: {told}", file=sys.stderr)
                return 2
    return _no_command(arguments)


def _run(command: Command, given: argparse.Namespace) -> int:
    module = importlib.import_module(command.module)
    try:
        code: int | None = module.run(given)
    except BrokenPipeError:  # `main` tells, whatever a command refuses
        raise
    except getattr(module, "REFUSALS", ()) as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        remedy = getattr(module, "INTERRUPTED", None)
        print(f"\nlexshard: interrupted{f'; {remedy}' if remedy else ''}", file=sys.stderr)
        return 130
    return code or 0


def _no_command(arguments: Sequence[str]) -> int:
    """Half a command, or none."""
    first, *others = arguments
    is_group = first in {words[0] for words in COMMANDS}
    if is_group and (not others or others[0] in HELP):
        print(usage(first))
        return 0 if others else 2
    name = " ".join(arguments[:2] if is_group else arguments[:1])
    known = [" ".join(words) for words in COMMANDS if not is_group or words[0] == first]
    if not is_group:
        known += {words[0] for words in COMMANDS}
    where = f"lexshard {first} --help" if is_group else "lexshard --help"
    question = did_you_mean(name, known)
    print(
        f"lexshard: no command '{name}'{question} ({where} tells which there are)", file=sys.stderr
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
