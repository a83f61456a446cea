"""What metrics and traces cost: per token, per step and per request, beside an earlier checkout.

    git worktree add /tmp/before COMMIT
    python -m lexshard.loadtest.bench.serve_path.observation_cost --before /tmp/before

Modules of the earlier checkout are loaded beside today's into this process, and both take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lexshard.actors import messages
from lexshard.actors.engine.statistics import Counters
from lexshard.actors.head.sequence_head import ShardCounters
from lexshard.actors.messages import Request, SamplingParameters, SequenceTiming
from lexshard.serve_app.admission import Admission
from lexshard.serve_app.observability import http_metrics
from lexshard.serve_app.openai import generation
from lexshard.serve_app.openai.choice import Choice, OutputOptions
from lexshard.serve_app.request_record import RequestRecord

EVENTS, TURNS = 2000, 15
TOKEN_BYTES: Any = {byte: bytes([byte]) for byte in range(256)}


def beside(folder: Path, path: str) -> Any:
    """The module at ``path`` of another checkout, under a name of its own."""
    name = "before_" + path.replace("/", "_").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, folder / path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Stream:
    """Events of one token each, that are all there already."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = iter(events)

    async def arrived(self) -> Sequence[Any]:
        return [next(self._events)]

    def close(self) -> None:
        pass


class _Client:
    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def submit(self, requests: Sequence[Request]) -> _Stream:
        return _Stream(self._events)

    def cancel(self, request_id: str) -> None:
        pass


def per_token(module: Any, words: Any) -> float:
    """Microseconds that following a request takes per token, in an API process."""
    request = Request("name", 0, (1, 2, 3), SamplingParameters(max_tokens=EVENTS))
    events = [
        words.SequenceEvent(
            "name", 0, (97,), finish_reason="length" if place + 1 == EVENTS else None
        )
        for place in range(EVENTS)
    ]
    choice = Choice(0, request, "", OutputOptions(), TOKEN_BYTES)
    ticket = Admission(8, 10_000, None).admit("client", 1, 3)
    record = RequestRecord("name", "POST", "/v1/completions", "client")
    followed = module.Generation(_Client(events), [choice], TOKEN_BYTES, ticket, record)

    async def follow() -> None:
        async for _ in followed.batches():
            pass

    started = time.perf_counter()
    asyncio.run(follow())
    seconds = time.perf_counter() - started
    followed.close()
    assert record.completion_tokens == EVENTS
    return 1e6 * seconds / EVENTS


def per_message(words: Any) -> float:
    """Microseconds to pack and unpack a step's message of one token."""
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(words.StepOutput).decode
    output = words.StepOutput((words.SequenceEvent("name-0-0", 0, (97,)),))
    return timed(lambda: decode(encode(output)), EVENTS)


def timed(call: Callable[[], Any], count: int) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return 1e6 * (time.perf_counter() - started) / count


def finished(pieces: int) -> RequestRecord:
    """One that has been answered, with ``pieces`` steps."""
    record = RequestRecord("name", "POST", "/v1/completions", "client", status=200)
    record.first_token_time = record.start_time
    record.prompt_tokens, record.completion_tokens = 4, pieces
    record.piece_times = [record.start_time + 0.001 * place for place in range(pieces)]
    record.note_timing(SequenceTiming(0.001, 0.002))
    return record


def per_step() -> float:
    """Microseconds that an engine's step takes to be counted by phase, shards not included."""
    counters, shards = Counters(), ShardCounters()

    def step() -> None:
        counters.observe("body", 0.0004)
        before = shards.exchange_seconds
        counters.observe("head", 0.0004)
        assert shards.exchange_seconds == before
        counters.decide_seconds += 0.0001
        counters.step_decided()

    return timed(step, EVENTS)


def per_trace() -> float:
    """Microseconds that the spans of a request take; sending them is another thread's work."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from lexshard.serve_app.observability.tracing import Tracing

    tracing = Tracing("http://none", {}, "1", ("/v1/completions",), InMemorySpanExporter())

    def trace() -> None:
        record = finished(2)
        tracing.begin(record, {})
        tracing.end(record)

    try:
        return timed(trace, 300) - timed(lambda: finished(2), 300)
    finally:
        tracing.close()


def main() -> None:
    """Prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, metavar="FOLDER")
    before: Path = parser.parse_args().before
    old_words = beside(before, "actors/messages.py")
    old_generation = beside(before, "serve_app/openai/generation.py")
    old_http = next(
        beside(before, path)
        for path in ("serve_app/observability/http_metrics.py", "serve_app/metrics.py")
        if (before / path).is_file()
    )
    paths = ("/v1/completions", "/health")
    old, new = old_http.HttpCollector(paths, None), http_metrics.HttpCollector(paths, None)
    answered = finished(200)
    cases: dict[str, Callable[[], float]] = {
        "token in an API process, before": lambda: per_token(old_generation, old_words),
        "token in an API process, now": lambda: per_token(generation, messages),
        "message of one token, before": lambda: per_message(old_words),
        "message of one token, now": lambda: per_message(messages),
        "phases of a step (before: none)": per_step,
        "request of 200 tokens counted, before": lambda: timed(lambda: old.observe(answered), 300),
        "request of 200 tokens counted, now": lambda: timed(lambda: new.observe(answered), 300),
        "spans of a request, with --otlp-traces-endpoint alone": per_trace,
    }
    measured: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(TURNS):
        for name, case in cases.items():
            measured[name].append(case())
    for name, values in measured.items():
        print(f"{name:<56} {statistics.median(values):8.2f} us  (least {min(values):.2f})")


if __name__ == "__main__":
    main()
