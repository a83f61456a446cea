"""The ``lexshard`` command. Each subcommand is a module with ``add_arguments`` and ``run``,
imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

COMMANDS = {
    ("serve",): ("serve_app.commands.serve", "serve a model over an OpenAI-compatible API"),
    ("status",): ("serve_app.commands.status", "who does what in a running server"),
    ("completion",): (
        "serve_app.commands.completion",
        "print what makes a shell complete this command",
    ),
    ("config", "show"): (
        "serve_app.commands.config_show",
        "show the configuration in effect, and where each value comes from",
    ),
    ("config", "check"): (
        "serve_app.commands.config_check",
        "check a configuration file without starting anything",
    ),
    ("config", "schema"): (
        "serve_app.commands.config_schema",
        "print the JSON schema of configuration files, for editors",
    ),
    ("topology", "plan"): (
        "serve_app.commands.topology_plan",
        "print what would go where before anything starts",
    ),
    ("cluster", "check"): (
        "serve_app.commands.cluster_check",
        "check a file of `ray up` without starting anything",
    ),
    ("index", "build"): (
        "serve_app.commands.index_build",
        "build the vocabulary index of a model",
    ),
    ("index", "show"): ("serve_app.commands.index_show", "report what an index file holds"),
    ("hotset", "build"): (
        "serve_app.commands.hotset_build",
        "choose the tokens that samplers look at first",
    ),
    ("hotset", "show"): ("serve_app.commands.hotset_show", "report what a hot vocabulary holds"),
    ("router", "train"): (
        "serve_app.commands.router_train",
        "train which output rows a draft model looks at",
    ),
    ("demo", "train"): ("serve_app.commands.demo_train", "train the small demonstration models"),
    ("bench", "engine"): ("loadtest.bench.engine.command", "measure the engine without HTTP"),
    ("bench", "head"): ("loadtest.bench.head.command", "measure the output head beside dense ones"),
    ("bench", "draft"): ("loadtest.bench.draft.command", "count the guesses that stand, by head"),
    ("bench", "sampler"): ("loadtest.bench.sampler.command", "measure the sampler beside vLLM's"),
    ("bench", "verify"): ("loadtest.bench.verify.command", "measure the verification of drafts"),
    ("bench", "shards"): (
        "loadtest.bench.shards.command",
        "measure a head in several processes; model more",
    ),
    ("bench", "serve-path"): (
        "loadtest.bench.serve_path.command",
        "measure the way from the engine to the wire",
    ),
    ("bench", "serve"): (
        "loadtest.bench.serve.command",
        "put any OpenAI endpoints under the same load, by turns",
    ),
    ("bench", "rest"): (
        "loadtest.bench.rest.command",
        "measure what a server costs while nobody asks it",
    ),
    ("bench", "start"): (
        "loadtest.bench.start.command",
        "measure a start to the first token, also after a kill",
    ),
    ("report",): ("loadtest.report.command", "a page with plots from the files of --json"),
    ("chaos",): ("loadtest.chaos.command", "attack a server of its own: does it keep its word?"),
}


def usage() -> str:
    lines = [f"  lexshard {' '.join(words):<14} {text}" for words, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: lexshard COMMAND [options]", "", *lines, "", "--help after a command tells more."]
    )


def parser_of(words: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options of one of ``COMMANDS``."""
    module_name, text = COMMANDS[words]
    # Half a name might be that of an option of tomorrow. A command may tell more with --help.
    parser = argparse.ArgumentParser(
        f"lexshard {' '.join(words)}",
        description=text,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    importlib.import_module(module_name).add_arguments(parser)
    return parser


# As a shell tells of a program that SIGPIPE ended.
NOBODY_READS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(version("lexshard"))
        return 0
    for words, (module_name, _) in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            parser = parser_of(words)
            module = importlib.import_module(module_name)
            given = parser.parse_args(arguments[len(words) :])
            try:
                code: int | None = module.run(given)
                sys.stdout.flush()
            except BrokenPipeError:  # whoever reads, `head` say, has read enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return NOBODY_READS
            return code or 0
    print(f"lexshard: no command '{' '.join(arguments[:2])}'\n\n{usage()}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
