"""What a terminal shows of replies, and how it is asked for more."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from lexshard.serve_app.terminal.client import RefusedError

CONTINUED, BLOCK = "\\", '"""'
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# Of what a model says, nothing moves the cursor or speaks to the terminal.
CONTROL = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\n\t"
}
HELP = 'a line that ends with \\ goes on; """ begins and ends several; Ctrl-C stops a reply'


def read_text(prompt: str, ask: Callable[[str], str] = input) -> str | None:
    """One text, of several lines where the first says so; None at the end of the input."""
    try:
        line = ask(prompt)
        if line.startswith(BLOCK):
            return _block(line.removeprefix(BLOCK), ask)
        lines = []
        while line.endswith(CONTINUED):
            lines.append(line.removesuffix(CONTINUED))
            line = ask("... ")
        return "\n".join([*lines, line])
    except EOFError:
        return None


def _block(line: str, ask: Callable[[str], str]) -> str:
    lines = []
    while not line.endswith(BLOCK):
        lines.append(line)
        line = ask("... ")
    return "\n".join([*lines, line.removesuffix(BLOCK)]).strip("\n")


def texts(given: str | None) -> Iterator[str]:
    """What is to be answered: the one ``given``, the one that is piped in, or what is typed, until
    there is no more. Ctrl-C forgets what is just typed."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is no text is refused as it is sent
        sys.stdin.reconfigure(errors="surrogateescape")
    if given is not None:
        yield given
    elif not sys.stdin.isatty():
        yield sys.stdin.read()
    else:
        import readline  # noqa: F401  # so that lines can be edited

        print(f"({HELP}; Ctrl-D ends)")
        while True:
            try:
                text = read_text("> ")
            except KeyboardInterrupt:
                print()
                continue
            if text is None:
                print()
                return
            if text.strip():
                yield text


def answered(pieces: Generator[tuple[str, bool], None, None]) -> str | None:
    """Shows a reply, or why there is none; what it said."""
    try:
        return show(pieces)
    except RefusedError as error:
        print(f"lexshard: {error}", file=sys.stderr)
        return None


def show(pieces: Generator[tuple[str, bool], None, None]) -> str:
    """Prints a reply as it comes, of which each piece says whether it is a thought; those are dim
    on a terminal, and left out elsewhere. Ctrl-C ends it. What it said by then, without thoughts.
    """
    said: list[str] = []
    terminal = sys.stdout.isatty()
    style = ""
    with closing(pieces):
        try:
            for text, is_thought in pieces:
                if not is_thought:
                    said.append(text)
                elif not terminal:
                    continue
                if terminal and style != (new := DIM if is_thought else PLAIN):
                    print(f"{PLAIN}\n" if style else "", end=new)
                    style = new
                print(text.translate(CONTROL), end="", flush=True)
        except KeyboardInterrupt:
            print(" ^C" if terminal else "", end="")
        finally:
            if said or style:
                print(PLAIN if terminal else "")
    return "".join(said)
