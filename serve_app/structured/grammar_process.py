"""The process that compiles what clients write, started as a file so that it loads nothing else.

llguidance bounds much, not everything: a regular expression may take minutes, a chain of rules the
whole stack, a schema gigabytes. So each grammar is compiled in a fork of a process that holds the
tokenizer, within limits of time and memory that the kernel keeps.

It reads lines of JSON from its standard input and answers in order, a line each: the first one has
the tokenizer and the limits, every other one is a grammar.
"""

from __future__ import annotations

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


def _in_fork(tokenizer: Any, limits: Any, bounds: dict[str, Any], text: str) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with open("/proc/self/statm") as statm:
            held = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (held + bounds["bytes"],) * 2)
        resource.setrlimit(resource.RLIMIT_STACK, (bounds["stack"],) * 2)
        signal.setitimer(signal.ITIMER_PROF, bounds["seconds"])
        try:
            with open(writing, "wb") as pipe:
                write_line(pipe, _checked(tokenizer, limits, text))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        why = FAULT_SIGNALS.get(signal.Signals(os.WTERMSIG(status)), "it cannot be compiled")
        return {"error": why, "warnings": []}
    if not told.endswith(b"\n"):
        return {"error": _TOO_LARGE, "warnings": []}
    answer: dict[str, Any] = json.loads(told)
    return answer


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
        while True:
            write_line(sink, _in_fork(tokenizer, limits, setup["bounds"], read_line(source)))
    except EOFError:
        return


if __name__ == "__main__":
    main()
