"""Locust users that stream from an OpenAI endpoint.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless -u 100 -r 10 -t 5m \\
        --cancel-share 0.2 --shape constant --html locust.html

Every answer is an event ``E2E`` (of type POST), with ``TTFT``, ``TPOT`` and every ``ITL`` beside it
(of type STREAM); one that its user cancels is an event ``cancelled``. An answer that does not end
with a finish_reason and [DONE] is a failure that says why, and nothing else. docs/load-tests.md
tells more.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from argparse import ArgumentParser
from typing import Any

import requests
from locust import LoadTestShape, User, events, task
from locust.env import Environment

from lexshard.loadtest.arrivals import SHAPES, users_at
from lexshard.loadtest.bench.load.plan import Lengths, Wording
from lexshard.loadtest.bench.load.timeline import RequestTimeline
from lexshard.loadtest.client import StreamedAnswer, refusal
from lexshard.loadtest.prompts import PromptWriter
from lexshard.loadtest.traces import SAMPLES, load_trace

TOKENS_PER_WORD = 1.5  # of English text, about: what it is with a tokenizer is in its answers
DEFAULT_SPAWN_RATE = 10.0


class StreamError(Exception):
    """An answer was none, or not a whole one."""


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("lexshard", "What users ask, and how many there are when")
    add = group.add_argument
    add("--model", default="", help="its name there (default: the first it lists)")
    add("--chat", action="store_true", help="ask /v1/chat/completions")
    add(
        "--trace",
        default="azure-conversation",
        help=f"lengths, and shared beginnings: a file, {', '.join(SAMPLES)}",
    )
    add("--length-scale", type=float, default=0.1, help="of the trace's lengths")
    add("--max-prompt-tokens", type=int, default=1000)
    add("--max-output-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.8)
    add("--respect-eos", action="store_true", help="do not send ignore_eos")
    add("--cancel-share", type=float, default=0.0, help="of requests left in mid-stream, 0 to 1")
    add("--think-seconds", type=float, default=0.5, help="mean, between requests")
    add("--shape", choices=SHAPES, default="constant", help="of the number of users")
    add("--period", type=float, default=60.0, help="seconds of a ramp or a spike")
    add("--silence-seconds", type=float, default=120.0, help="longest wait for a piece")
    add("--key-variable", default="", help="environment variable with the API key")
    add("--prompt-seed", type=int, default=17)


class Workload:
    """What all users of a process ask, in turn: the requests of a trace, over and over."""

    def __init__(self, options: Any, host: str) -> None:
        if not 0 <= options.cancel_share <= 1:
            raise ValueError(f"--cancel-share {options.cancel_share}: give a share from 0 to 1")
        # Processes that share a load ask different things.
        seed = options.prompt_seed + (os.getpid() if options.worker else 0)
        self.chance = random.Random(seed)
        self.host = host.rstrip("/").removesuffix("/v1")
        key = os.environ[options.key_variable] if options.key_variable else ""
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._options = options
        fields = {"temperature": options.temperature}
        if not options.respect_eos:
            fields["ignore_eos"] = True
        self._wording = Wording(options.chat, options.model or self._first_model(), fields)
        self.address = self.host + self._wording.path
        trace = load_trace(options.trace)
        lengths = Lengths(
            trace,
            options.length_scale,
            max_prompt_tokens=options.max_prompt_tokens,
            max_output_tokens=options.max_output_tokens,
        )
        self._requests = lengths.of_requests(len(trace.requests))
        self._writer = PromptWriter(seed, TOKENS_PER_WORD, lengths.block_tokens)
        self._turn = itertools.count()

    def next_body(self) -> dict[str, Any]:
        """The body of the next request."""
        index = next(self._turn)
        wanted = self._requests[index % len(self._requests)]
        prompt = self._writer.write(index, wanted.prompt_tokens, wanted.blocks)
        return self._wording.body(prompt, wanted.output_tokens)

    def pieces_until_cancel(self, tokens: int) -> int | None:
        """After how many pieces of its text a request is left; None if it is heard out."""
        if self.chance.random() >= self._options.cancel_share:
            return None
        return self.chance.randint(1, max(1, tokens - 1))

    def think_seconds(self) -> float:
        mean = self._options.think_seconds
        return self.chance.expovariate(1 / mean) if mean > 0 else 0.0

    def _first_model(self) -> str:
        answer = requests.get(f"{self.host}/v1/models", headers=self.headers, timeout=30)
        return str(answer.json()["data"][0]["id"])


_workloads: dict[str, Workload] = {}


def workload_of(environment: Environment, host: str) -> Workload:
    """That of this process, made when its first user asks."""
    if host not in _workloads:
        _workloads[host] = Workload(environment.parsed_options, host)
    return _workloads[host]


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    """Whoever is given on the command line is asked before the first user comes."""
    if environment.host:
        try:
            workload_of(environment, environment.host)
        except (OSError, ValueError, LookupError) as error:
            sys.exit(f"locustfile: {environment.host}: {error}")


class StreamingUser(User):
    """Asks, reads along, thinks, asks again; leaves now and then before the end."""

    def on_start(self) -> None:
        self.workload = workload_of(self.environment, self.host or "http://127.0.0.1:8000")

    def wait_time(self) -> float:
        return self.workload.think_seconds()

    @task
    def ask(self) -> None:
        body = self.workload.next_body()
        leave_after = self.workload.pieces_until_cancel(body["max_tokens"])
        answer, heard = StreamedAnswer(), 0
        started = time.perf_counter()
        cancelled, fault = False, ""
        try:
            with requests.post(
                self.workload.address,
                json=body,
                headers={**self.workload.headers, "Connection": "close"},
                timeout=self.environment.parsed_options.silence_seconds,
                stream=True,
            ) as response:
                for data in response.iter_content(None) if response.ok else ():
                    heard += len(data)
                    answer.feed(data, time.perf_counter())
                    if leave_after is not None and len(answer.pieces) >= leave_after:
                        cancelled = True
                        break
                fault = (
                    answer.fault if response.ok else refusal(response.status_code, response.content)
                )
        except requests.Timeout:
            fault = "nothing came for --silence-seconds"
        except requests.RequestException as error:
            fault = f"connection: {type(error).__name__}"
        ended = time.perf_counter()
        self._tell(answer, started, ended, heard, cancelled and not answer.done, fault)

    def _tell(
        self,
        answer: StreamedAnswer,
        started: float,
        ended: float,
        heard: int,
        cancelled: bool,
        fault: str,
    ) -> None:
        """Locust's events, in milliseconds."""
        if cancelled:
            self._fire("STREAM", "cancelled", ended - started, heard)
        else:
            self._fire("POST", "E2E", (answer.heard or ended) - started, heard, fault)
            if fault:
                return
        told = RequestTimeline(
            started,
            started,
            answer.heard or ended,
            tuple(answer.pieces),
            answer.prompt_tokens or 0,
            answer.output_tokens,
        )
        if told.pieces:
            self._fire("STREAM", "TTFT", told.ttft)
        for gap in told.gaps:
            self._fire("STREAM", "ITL", gap)
        if told.tpot is not None and not cancelled:
            self._fire("STREAM", "TPOT", told.tpot)

    def _fire(self, kind: str, name: str, seconds: float, length: int = 0, fault: str = "") -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=1e3 * seconds,
            response_length=length,
            exception=StreamError(fault) if fault else None,
            context={},
        )


class ChosenShape(LoadTestShape):
    """As many users as ``--shape`` says, at most ``--users``; until ``--run-time``."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        seconds = self.get_run_time()
        if options.run_time and seconds > options.run_time:
            return None
        most = options.num_users or 1
        rate = options.spawn_rate or DEFAULT_SPAWN_RATE
        return users_at(options.shape, seconds, most, options.period), rate
