"""The process that compiles what clients write, started as a file so that it loads nothing else.

llguidance bounds much, not everything: a regular expression may take minutes, a chain of rules the
whole stack, a schema gigabytes. So each grammar is compiled in a fork of a process that holds the
tokenizer, within limits of time and memory that the kernel keeps. The next fork is there before its
grammar is.

It reads lines of JSON from its standard input and answers in order, a line each: the first one has
the tokenizer and the limits, every other one is a grammar.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

TOO_MUCH = "it takes too"  # so begins what is told of grammars that cost more than they may
_TOO_LARGE = f"{TOO_MUCH} much memory to compile"
FAULT_SIGNALS = {
    signal.SIGPROF: f"{TOO_MUCH} long to compile",
    signal.SIGABRT: _TOO_LARGE,
    signal.SIGKILL: _TOO_LARGE,
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGBUS: "it is nested too deeply",
}


def write_line(stream: BinaryIO, content: Any) -> None:
    stream.write(json.dumps(content).encode() + b"\n")
    stream.flush()


def read_line(stream: BinaryIO) -> Any:
    """Raises:
    EOFError: the peer is gone.
    """
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


def _checked(tokenizer: Any, limits: Any, text: str) -> dict[str, Any]:
    """``error`` says what is wrong with a grammar, None where nothing is; ``warnings`` what it does
    not hold."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    ends = set(tokenizer.eos_tokens)
    allowed: list[int] = []
    if not matcher.is_error():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        while mask and len(allowed) <= len(ends):  # one that is no end is enough
            lowest = mask & -mask
            allowed.append(lowest.bit_length() - 1)
            mask ^= lowest
    going_on = [token for token in allowed if token not in ends]
    error = matcher.get_error()
    if error.startswith("NoExtension") or not (error or going_on or matcher.is_accepting()):
        error = "nothing matches it"
    elif not error and going_on and matcher.consume_token(going_on[0]) and not matcher.rollback(1):
        # Drafts are rolled back.
        error = "it uses 'max_tokens' or 'stop', which this server has in its own fields"
    return {"error": error or None, "warnings": matcher.get_grammar_warnings()}


def _compile_simple(tokenizer: Any, limits: Any) -> None:
    """What is made with the first grammar of a process, and its memory, is there after it."""
    with contextlib.suppress(BaseException):  # a panic is no Exception, and tells of no other
        _checked(tokenizer, limits, 'start: %json {"type": "object"}')


def _held_bytes() -> int | None:
    """Of addresses; None where the system limits none (macOS)."""
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


class _Fork:
    """A copy of this process that waits for one grammar. To make it and get its memory takes longer
    than to compile most: so it is there, and has compiled a simple one, before there is any."""

    def __init__(self, tokenizer: Any, limits: Any, bounds: dict[str, Any]) -> None:
        reading, asking = os.pipe()
        answering, writing = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                # What ends with this process or its peer must not wait for the copy.
                for inherited in (0, 1, asking, answering):
                    os.close(inherited)
                held = _held_bytes()
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_STACK, (bounds["stack"],) * 2)
                with open(reading, "rb") as source, open(writing, "wb") as sink:
                    _compile_simple(tokenizer, limits)
                    text = read_line(source)
                    if held is not None:
                        resource.setrlimit(resource.RLIMIT_AS, (held + bounds["bytes"],) * 2)
                    signal.setitimer(signal.ITIMER_PROF, bounds["seconds"])
                    write_line(sink, _checked(tokenizer, limits, text))
            finally:
                os._exit(0)
        os.close(reading)
        os.close(writing)
        self._sink, self._source = os.fdopen(asking, "wb"), os.fdopen(answering, "rb")

    def waits(self) -> bool:
        """Whether it is still there: where memory is short, the kernel may have ended it."""
        return os.waitpid(self._process, os.WNOHANG)[0] == 0

    def compiled(self, text: str) -> dict[str, Any] | None:
        """What `_checked` says of the one grammar; None where the copy ended instead."""
        try:
            write_line(self._sink, text)
            told: dict[str, Any] = read_line(self._source)
        except (OSError, EOFError):
            return None
        return told

    def end(self) -> dict[str, Any]:
        """Waits for its end; what is told of a grammar that it ended without an answer to."""
        self._source.close()
        self._sink.close()
        _, status = os.waitpid(self._process, 0)
        why = _TOO_LARGE
        if os.WIFSIGNALED(status):
            why = FAULT_SIGNALS.get(signal.Signals(os.WTERMSIG(status)), "it cannot be compiled")
        return {"error": why, "warnings": []}


def main() -> None:
    """Compiles until its standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the peer ends it
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # where llguidance tells of its panics
    from llguidance import LLParserLimits, LLTokenizer

    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        setup = read_line(source)
        limits = LLParserLimits(**setup["limits"])
        try:
            tokenizer = LLTokenizer(
                setup["tokenizer"], n_vocab=setup["vocabulary_size"], eos_token=setup["ends"]
            )
        except BaseException as error:  # what llguidance finds unusual about it, panics included
            while read_line(source):
                why = f"no grammar can be held with this model's tokenizer: {error}"
                write_line(sink, {"error": why, "warnings": []})
        _compile_simple(tokenizer, limits)
        while True:
            fork = _Fork(tokenizer, limits, setup["bounds"])
            text = read_line(source)
            if not fork.waits():  # through no fault of this grammar
                fork = _Fork(tokenizer, limits, setup["bounds"])
            told = fork.compiled(text)
            if told is not None:
                write_line(sink, told)
            because = fork.end()
            if told is None:
                write_line(sink, because)
    except EOFError:
        return


if __name__ == "__main__":
    main()
