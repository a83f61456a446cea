"""Grammars are compiled before they reach the engine, so that bad ones are refused by name."""

from __future__ import annotations

import hashlib
import select
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.grammar.limits import PARSER
from lexshard.serve_app.openai.errors import overloaded
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.openai.workers import Receive
from lexshard.serve_app.structured import grammar_process
from lexshard.serve_app.structured.constraint import (
    MAX_BYTES,
    MAX_SECONDS,
    STACK_BYTES,
    check_size,
)
from lexshard.serve_app.structured.turns import FairWorker

REMEMBERED = 512  # grammars
# Of one client's grammars that wait: a thousand of the shortest. Clients take turns: however slow
# these are, another waits half a second for them at most.
MAX_WAITING_BYTES = 4 * 1024 * 1024
LEAST_BYTES = 4096  # however short, one may take long
# The first grammar waits for the tokenizer of another process.
PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a grammar: ``error`` is why it is none, ``warnings`` what it does not hold."""

    error: str | None
    warnings: tuple[str, ...] = ()


class GrammarCompiler:
    """Compiles grammars for the engine's model in a process of its own, which starts with the first
    of them. What came of a text is remembered."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._worker = FairWorker(MAX_WAITING_BYTES)
        self._remembered: OrderedDict[bytes, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    async def compiled(
        self, text: str, field: str, information: EngineInformation, receive: Receive, client: str
    ) -> Compiled:
        """What comes of a top-level grammar, which ``field`` of a request of ``client`` asked for;
        ``receive`` tells whether the client is there.

        Raises:
            ApiError: 400 for a text that is too long, 503 where too many of the client's wait.
            ClientDisconnectedError: the client left.
        """
        data = text.encode()
        check_size(len(data), field)
        name = hashlib.blake2b(data).digest()
        known = self._recalled(name)
        if known is None:
            work = partial(self._compile, name, text, information)
            known = await self._worker.run(client, max(len(data), LEAST_BYTES), work, receive)
        return known

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _recalled(self, name: bytes) -> Compiled | None:
        with self._lock:
            known = self._remembered.get(name)
            if known is not None:
                self._remembered.move_to_end(name)
            return known

    def _compile(self, name: bytes, text: str, information: EngineInformation) -> Compiled:
        known = self._recalled(name)  # it may have waited behind the same
        if known is not None:
            return known
        try:
            told = self._asked(text, information)
        except BaseException as error:
            # The next grammar starts another, and is not told what this one comes to.
            self.close()
            if isinstance(error, OSError | EOFError):
                failed = "the process that compiles grammars failed; try again"
                raise overloaded(failed) from error
            raise
        compiled = Compiled(told["error"], tuple(told["warnings"]))
        with self._lock:
            self._remembered[name] = compiled
            while len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return compiled

    def _asked(self, text: str, information: EngineInformation) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # others have ended it
        if self._process is None:
            self._process = self._started(information)
        source: Any = self._process.stdout
        sink: Any = self._process.stdin
        _write(sink, text)
        answered = select.poll()  # `select.select` knows 1,024 files
        answered.register(source, select.POLLIN)
        if not answered.poll(1000 * PATIENCE_SECONDS):
            raise TimeoutError
        answer: dict[str, Any] = grammar_process.read_line(source)
        return answer

    def _started(self, information: EngineInformation) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", grammar_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        weakref.finalize(self, process.kill)
        _write(
            process.stdin,
            {
                "tokenizer": self._tokenizer.json(),
                "vocabulary_size": information.vocabulary_size,
                "ends": information.eos_token_ids,
                "limits": PARSER,
                "bounds": {"seconds": MAX_SECONDS, "bytes": MAX_BYTES, "stack": STACK_BYTES},
            },
        )
        return process


def _write(stream: Any, content: Any) -> None:
    data = orjson.dumps(content)  # a tokenizer may be 20 MB
    stream.write(data + b"\n")
    stream.flush()
