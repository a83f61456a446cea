"""``lexshard completion bash|zsh|fish``: a script that completes commands, options and values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any, Literal, get_args, get_origin

from lexshard.cluster.config import OPTIONS
from lexshard.serve_app.cli import COMMANDS, parser_of

SHELLS = ("bash", "zsh", "fish")

_BASH = Template("""\
# lexshard: source this file, or put it into the folder of bash-completion as "lexshard".
_lexshard() {
    local word="$${COMP_WORDS[COMP_CWORD]}" before="$${COMP_WORDS[COMP_CWORD-1]}"
    local command="" offered="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$$command $${COMP_WORDS[i]}" in
$commands
            *) break ;;
        esac
    done
    COMPREPLY=()
    case "$$command|$$before" in
$values
    esac
    case "$$command" in
$options
    esac
    COMPREPLY=($$(compgen -W "$$offered" -- "$$word"))
    if [[ $${#COMPREPLY[@]} -eq 0 && "$$word" != -* ]]; then
        COMPREPLY=($$(compgen -f -- "$$word"))
    fi
}
complete -o filenames -F _lexshard lexshard
""")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = (
        "bash: source <(lexshard completion bash); zsh: the same with zsh; "
        "fish: lexshard completion fish | source"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit status."""
    commands = {words: tuple(_arguments(parser_of(words))) for words in COMMANDS}
    if arguments.shell == "fish":
        print(fish_script(commands), end="")
    else:
        print((_ZSH if arguments.shell == "zsh" else "") + bash_script(commands), end="")
    return 0


@dataclass(frozen=True, slots=True)
class Completable:
    """An argument of a command: its ``flags``, none where it is known by its place. Of ``values``
    there are none where it has no choices; ``takes_value`` says whether a word follows it."""

    flags: tuple[str, ...]
    help: str
    values: tuple[str, ...]
    takes_value: bool


Commands = Mapping[tuple[str, ...], tuple[Completable, ...]]


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Completable]:
    of_server = {option.flag: _choices(option.kind) for option in OPTIONS}
    for action in parser._actions:
        values = tuple(map(str, action.choices or ()))
        for flag in action.option_strings:  # checked with the file and the environment, not here
            values = values or of_server.get(flag, ())
        yield Completable(
            tuple(action.option_strings), action.help or "", values, action.nargs != 0
        )


def _choices(kind: Any) -> tuple[str, ...]:
    """The words that a type allows; none where it allows any."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next(filter(None, map(_choices, get_args(kind))), ())


def _groups() -> dict[str, list[str]]:
    """What may follow each beginning of a command."""
    groups: dict[str, list[str]] = {}
    for words in COMMANDS:
        for place, word in enumerate(words):
            known = groups.setdefault(" ".join(words[:place]), [])
            if word not in known:
                known.append(word)
    return groups


def bash_script(commands: Commands) -> str:
    """For bash, and for zsh's emulation of it."""
    words, values, options = [], [], []
    groups = _groups()
    for begin, following in groups.items():
        for word in following:
            name = f"{begin} {word}".strip()
            words.append(f'            "{begin} {word}") command="{name}" ;;')
        options.append(f'        "{begin}") offered="{" ".join(following)}" ;;')
    for command, arguments in commands.items():
        name = " ".join(command)
        offered: list[str] = []
        for each in arguments:
            offered += each.flags or each.values
            if not (each.flags and each.takes_value):
                continue
            pattern = " | ".join(f'"{name}|{flag}"' for flag in each.flags)
            if each.values:
                answer = f'COMPREPLY=($(compgen -W "{" ".join(each.values)}" -- "$word"))'
            else:
                answer = 'COMPREPLY=($(compgen -f -- "$word"))'
            values.append(f"        {pattern}) {answer}; return ;;")
        options.append(f'        "{name}") offered="{" ".join(offered)}" ;;')
    return _BASH.substitute(
        commands="\n".join(words), values="\n".join(values), options="\n".join(options)
    )


def fish_script(commands: Commands) -> str:
    """For fish, which shows what each option is for."""
    lines = ["# lexshard: lexshard completion fish | source"]
    for begin, following in _groups().items():
        for word in following:
            whole = COMMANDS.get((*begin.split(), word))
            text = whole.text if whole else ""
            seen = _seen(begin.split(), following)
            lines.append(f"complete -c lexshard -f -n {seen} -a {word} -d {_quoted(text)}")
    for command, arguments in commands.items():
        # `bench serve` is not `serve`.
        others = {words[0] for words in COMMANDS if len(command) == 1 and words[1:2] == command}
        seen = _seen(command, sorted(others))
        for each in arguments:
            spelt = "".join(
                f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}"
                for flag in each.flags
            )
            taken = " -r" if each.flags and each.takes_value else ""
            values = f" -x -a {_quoted(' '.join(each.values))}" if each.values else ""
            if spelt or values:
                told = f" -d {_quoted(each.help)}"
                lines.append(f"complete -c lexshard -n {seen}{spelt}{taken}{values}{told}")
    return "\n".join(lines) + "\n"


def _seen(before: list[str] | tuple[str, ...], after: list[str]) -> str:
    """Fish's condition that the words ``before`` have been typed, and none of ``after``."""
    parts = [f"__fish_seen_subcommand_from {word}" for word in before]
    if not before:
        parts.append("__fish_use_subcommand")
    elif after:
        parts.append(f"not __fish_seen_subcommand_from {' '.join(after)}")
    return _quoted("; and ".join(parts))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{' '.join(escaped.split())}'"
