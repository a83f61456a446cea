"""The log lines of a process: text for people, or one JSON object a line for programs."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import orjson

LogFormat = Literal["text", "json"]
# What Ray puts before the lines of other processes, in colours or without.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# How Python's own format begins, which processes without a format of ours use.
_BASIC = re.compile(r"(WARNING|ERROR|CRITICAL):([\w.]+):(.*)", re.DOTALL)
_PROCESS = re.compile(r"\(([^()]* pid=\d+[^()]*)\) ?(.*)", re.DOTALL)


class JsonFormatter(logging.Formatter):
    """What a line says, and the ``fields`` it was given (``extra={"fields": {...}}``)."""

    def format(self, record: logging.LogRecord) -> str:
        told = _line(record.levelname, record.name, record.getMessage(), record.created)
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(told, default=str).decode()


def log_to(stream: TextIO | None, log_format: LogFormat) -> None:
    """One handler for everything of ours in this process."""
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("lexshard")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def json_line(text: str) -> str:
    """A line that any process of a server has printed, as one JSON object.

    What is one already is passed on, with the name that Ray gave its process.
    """
    text = _COLOUR.sub("", text).rstrip("\r\n")
    match = _PROCESS.fullmatch(text)
    process, said = (None, text) if match is None else match.groups()
    try:
        told: Any = orjson.loads(said)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict):
        basic = _BASIC.fullmatch(said)
        level, logger, message = basic.groups() if basic else ("INFO", "lexshard.output", said)
        told = _line(level, logger, message, datetime.now(UTC).timestamp())
    if process is not None:
        told["process"] = process
    return orjson.dumps(told).decode()


def print_lines(text: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """What a command says while its server has no logger yet, on standard output or ``stream``."""
    if log_format == "json":
        text = "\n".join(json_line(line) for line in text.splitlines() if line.strip())
    print(text, file=stream or sys.stdout, flush=True)


def _line(level: str, logger: str, message: str, seconds: float) -> dict[str, Any]:
    moment = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return {"time": moment, "level": level, "logger": logger, "message": message}
