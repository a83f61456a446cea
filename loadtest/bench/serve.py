"""``lexshard bench serve --against URL``: open-loop load on any OpenAI endpoint.

Requests come at a rate (a Poisson process, gamma-distributed gaps, evenly) or as in a trace,
whether or not earlier ones are answered. Several ``--against`` take turns under the same requests
at the same moments; the first of them is ours. A client process of its own sends and listens, and
says how late it was itself: beyond ``--late-limit`` the command warns and its exit status is 1.

What every figure means is in docs/load-tests.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, cast

from tqdm import tqdm

from lexshard.loadtest.bench.frame import new_report, run_bench
from lexshard.loadtest.bench.load.load_report import LoadReport
from lexshard.loadtest.bench.load.plan import (
    Arrivals,
    Lengths,
    PlannedRequest,
    Wording,
    plan_requests,
)
from lexshard.loadtest.bench.load.sender import ClientTask, Outcome, send
from lexshard.loadtest.bench.load.timeline import LoadRun
from lexshard.loadtest.bench.options.serve import QUICK_SECONDS, REQUESTS
from lexshard.loadtest.bench.record import CaseLabels, Report
from lexshard.loadtest.bench.servers.endpoint import Endpoint, served_model, tokens_per_word
from lexshard.loadtest.traces import TracedRequest, load_trace

WARM_UP_SEED = 500_000  # prompts like those of no run
PROMPT_MARGIN = 1.15  # a prompt is sized by words: its tokens may be some more
TOLD = ("TTFT median", "TTFT p99", "ITL p99", "output tokens/s")  # measures with a line each


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 where nothing could be measured or the client was late, 2 where
    something is missing."""
    for package in ("httptools", "uvloop", *(("matplotlib",) if arguments.html else ())):
        if importlib.util.find_spec(package) is None:
            told = f"lexshard bench serve: needs {package}: pip install '.[load]' in a checkout"
            print(told, file=sys.stderr)
            return 2
    plain = new_report(arguments.seed)
    report = LoadReport(
        plain.machine, plain.versions, plain.command, plain.seed, objectives=tuple(arguments.slo)
    )

    def measured(_: Report, arguments: argparse.Namespace) -> int:
        try:
            measure(arguments, report)
        finally:
            report.tell(arguments.late_limit, TOLD)
        return report.late_runs

    status = run_bench("serve", arguments, measured, checked="runs of a late client", report=report)
    if arguments.html is not None and report.runs:
        from lexshard.loadtest.report.page import write_page

        write_page([report.as_json()], arguments.html)
        print(f"written: {arguments.html}")
    return status


_Plan = partial[list[PlannedRequest]]


@dataclass(frozen=True, slots=True)
class _Contestant:
    endpoint: Endpoint
    wording: Wording
    max_tokens: int | None  # of prompt and answer, where the endpoint tells


def measure(arguments: argparse.Namespace, report: LoadReport) -> None:
    """Adds every rate on every endpoint, which take turns.

    Raises:
        ValueError, RuntimeError: options that fit neither each other nor the endpoints; an endpoint
            that answers nothing. The report keeps the rates before it.
    """
    names = [each.name for each in arguments.against]
    if len(set(names)) < len(names):
        raise ValueError("--against: two endpoints with one name: give NAME=URL")
    if arguments.key_variable and arguments.key_variable not in os.environ:
        raise ValueError(f"--key-variable: {arguments.key_variable} is not set")
    lengths = Lengths(
        load_trace(arguments.trace) if arguments.trace else None,
        arguments.length_scale,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.max_prompt_tokens,
        arguments.max_output_tokens,
    )
    cases = _cases(arguments, lengths)
    contestants = [_contestant(arguments, each) for each in arguments.against]
    most = max(count for _, count in cases)
    _check_context(contestants, lengths.of_requests(most))
    first = contestants[0]
    size = tokens_per_word(first.endpoint, first.wording, arguments.key_variable)
    plan = partial(plan_requests, lengths=lengths, tokens_per_word=size)
    _warm_up(arguments, contestants, plan)
    total = arguments.runs * len(contestants) * sum(count for _, count in cases)
    with tqdm(total=total, unit="request", file=sys.stderr, dynamic_ncols=True) as bar:
        for index, (arrivals, count) in enumerate(cases):
            runs = []
            for turn in range(arguments.runs):
                # Other prompts and moments in every run, the same for all endpoints in it.
                seed = arguments.seed + 1000 * index + turn
                for each in contestants if turn % 2 == 0 else reversed(contestants):
                    bar.set_description(f"{_rate(arrivals)} {each.endpoint.name}")
                    requests = plan(each.wording, arrivals=arrivals, count=count, seed=seed)
                    timelines, delays = _ask(arguments, each, requests, bar)
                    place = (each.endpoint.name, _rate(arrivals), turn)
                    runs.append(LoadRun(*place, tuple(timelines), tuple(delays)))
            report.add_runs(_labels(arguments, arrivals, count, lengths), runs, ours=names[0])


def _cases(arguments: argparse.Namespace, lengths: Lengths) -> list[tuple[Arrivals, int]]:
    """How requests come in each case, and how many."""
    kind, requests, seconds = arguments.arrivals, arguments.requests, arguments.seconds
    rates: Sequence[float | None] = (None,) if kind == "trace" else arguments.rate
    if requests is None and seconds is None:
        if arguments.quick:
            seconds = QUICK_SECONDS
        elif kind != "trace":
            requests = REQUESTS
    if kind != "gamma" and arguments.burstiness != 1.0:
        raise ValueError(f"--burstiness is for --arrivals gamma, not {kind}")
    if not 0 < arguments.time_scale < float("inf"):
        raise ValueError(f"--time-scale {arguments.time_scale}: give a positive number")
    cases = [Arrivals(kind, rate, arguments.burstiness, arguments.time_scale) for rate in rates]
    return [(each, each.count(lengths.trace, requests, seconds)) for each in cases]


def _contestant(arguments: argparse.Namespace, asked: Endpoint) -> _Contestant:
    model = served_model(asked, arguments.model, arguments.key_variable)
    eos = {} if arguments.respect_eos else {"ignore_eos": True}
    fields = {"temperature": arguments.temperature, **eos, **arguments.body}
    return _Contestant(asked, Wording(arguments.chat, model.name, fields), model.max_tokens)


def _check_context(contestants: Sequence[_Contestant], requests: Sequence[TracedRequest]) -> None:
    """Raises ValueError where a model that tells its length would refuse requests of the load."""
    longest = max(PROMPT_MARGIN * each.prompt_tokens + each.output_tokens for each in requests)
    for each in contestants:
        if each.max_tokens is not None and longest > each.max_tokens:
            raise ValueError(
                f"requests of up to {longest:.0f} tokens, and {each.endpoint.name} takes "
                f"{each.max_tokens}: give --length-scale, --max-prompt-tokens or "
                "--max-output-tokens"
            )


def _warm_up(
    arguments: argparse.Namespace, contestants: Sequence[_Contestant], plan: _Plan
) -> None:
    """Raises RuntimeError with the reason if an endpoint answers none of a few requests."""
    if arguments.warm_up < 1:
        return
    seed, count = arguments.seed + WARM_UP_SEED, arguments.warm_up
    for each in contestants:
        requests = plan(each.wording, arrivals=Arrivals("constant", 10.0), count=count, seed=seed)
        timelines, _ = _ask(arguments, each, requests, None)
        if all(request.fault for request in timelines):
            raise RuntimeError(f"{each.endpoint.name} answers nothing: {timelines[0].fault}")


def _ask(
    arguments: argparse.Namespace,
    contestant: _Contestant,
    requests: list[PlannedRequest],
    bar: Any,
) -> Outcome:
    """One run of the client, in a process of its own. Raises RuntimeError where it fails."""
    task = ClientTask(
        contestant.endpoint.url,
        contestant.wording.path,
        requests,
        arguments.timeout,
        arguments.key_variable,
    )
    context = get_context("spawn")
    heard, told = context.Pipe(duplex=False)
    client = context.Process(target=send, args=(task, told), daemon=True)
    client.start()
    told.close()
    shown = 0
    try:
        while isinstance(said := heard.recv(), int):
            if bar is not None:
                bar.update(said - shown)
                shown = said
    except EOFError:
        client.join()
        raise RuntimeError(
            f"the client of {contestant.endpoint.name} failed with code {client.exitcode}"
        ) from None
    if bar is not None:
        bar.update(len(requests) - shown)
    client.join()
    return cast(Outcome, said)


def _rate(arrivals: Arrivals) -> float | str:
    return "trace" if arrivals.rate is None else arrivals.rate


def _labels(
    arguments: argparse.Namespace, arrivals: Arrivals, count: int, lengths: Lengths
) -> CaseLabels:
    labels: CaseLabels = {
        "rate": _rate(arrivals),
        "arrivals": arrivals.kind,
        "requests": count,
        "lengths": lengths.name(),
    }
    if arrivals.kind == "gamma":
        labels["burstiness"] = arrivals.burstiness
    if arrivals.rate is None:
        labels["time scale"] = arrivals.time_scale
    if arguments.slo:
        labels["objectives"] = " ".join(map(str, arguments.slo))
    return labels
