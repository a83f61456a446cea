"""``lexshard bench edge``: texts through a thin link, drafted by a device, and of the server alone.

A server of its own, a device in this process, and between them a link of the wanted rate and round
trip (`loadtest.shaped_link`). The device and a plain streamed completion take turns over the same
link, with the same prompts and seeds. What it would take to send every guess's whole distribution
as fp32 is computed, not sent.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from lexshard.actors.edge.drafting import EdgeSettings
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.loadtest.bench.frame import in_turns, run_bench
from lexshard.loadtest.bench.record import CaseLabels, Measure, Report, paired_ratio
from lexshard.loadtest.bench.servers.command import our_server
from lexshard.loadtest.bench.servers.running import running
from lexshard.loadtest.client import Client, StreamedAnswer, fault_of
from lexshard.loadtest.prompts import PromptWriter
from lexshard.loadtest.shaped_link import LinkShape, ShapedLink
from lexshard.serve_app.edge.client import EdgeClient, load_model
from lexshard.serve_app.edge.link import EdgeStatistics
from lexshard.serve_app.openai.parameters import completion_fields

SERVER_ALONE = "server alone"
PROMPT_WORDS = 30

TIME = Measure("time per token", "ms", higher_is_better=False)
FIRST = Measure("time to first token", "ms", higher_is_better=False)
UP = Measure("uplink per token", "bits", higher_is_better=False)
DOWN = Measure("downlink per token", "bits", higher_is_better=False)
GUESSES = Measure("uplink per guess, frames alone", "bits", higher_is_better=False)
LENGTH = Measure("tokens per answer", "tokens", higher_is_better=True)
RESAMPLED = Measure("guesses that did not stand", "%", higher_is_better=False)
SPLIT = {
    name: Measure(f"{name}, time per token", "ms", higher_is_better=False)
    for name in ("draft", "encode", "uplink", "verify", "downlink")
}
LATE = Measure("packets later than the link says", "ms", higher_is_better=False)
NOTES = """\
time per token: from asking to the last token; a device opened its connection when it found the
server. uplink, downlink: every byte on the link, HTTP and WebSocket headers included, over the
tokens generated. draft, encode: the device's own; uplink, downlink: what packets wait in the link;
verify: from the last packet up to the first down. They overlap where the device drafts ahead."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of all prompts took."""

    texts: tuple[tuple[int, ...], ...]
    seconds: float
    first: float  # seconds to the first token, on the average
    link: ShapedLink
    counted: EdgeStatistics | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    return run_bench("edge", arguments, measure, checked="texts")


def measure(report: Report, arguments: argparse.Namespace) -> int:
    """Every case; returns how many texts of same-token are not the server's own."""
    model = load_model(arguments.draft)
    tokenizer = model.tokenizer
    writer = PromptWriter(arguments.seed, tokens_per_word=1.0, block_tokens=1.0)
    prompts = [
        tuple(tokenizer.encode(writer.write(number, PROMPT_WORDS), add_special_tokens=True))
        for number in range(arguments.prompts)
    ]
    wrong = 0
    with running(our_server(["--model", arguments.model])) as server:
        server.wait_until_healthy()
        address = urlsplit(server.url)
        for rate, trip, heat in tqdm(list(_links(arguments)), unit="link", disable=None):
            shape = LinkShape(1e3 * rate, trip / 2e3, arguments.jitter / 1e3, arguments.loss)
            parameters = SamplingParameters(
                temperature=heat, max_tokens=arguments.tokens, ignore_eos=True
            )

            def texts(
                settings: EdgeSettings | None,
                number: int,
                shape: LinkShape = shape,
                parameters: SamplingParameters = parameters,
            ) -> Run:
                requests = [
                    Request(str(i), 0, prompt, replace(parameters, seed=1000 * number + i))
                    for i, prompt in enumerate(prompts)
                ]

                async def over_link() -> Run:
                    place = (address.hostname or "", address.port or 0)
                    async with ShapedLink(*place, shape, number) as link:
                        if settings is None:
                            return await _alone(link, requests)
                        url = f"http://127.0.0.1:{link.port}"
                        client = EdgeClient(url, None, model, settings)
                        return await _drafted(client, link, requests)

                return asyncio.run(over_link())

            wanted = dict(_settings(arguments))
            found = in_turns(
                {
                    SERVER_ALONE: partial(texts, None),
                    **{name: partial(texts, each) for name, each in wanted.items()},
                },
                arguments.runs,
            )
            labels: CaseLabels = {"kbit/s": rate, "round trip ms": trip, "temperature": heat}
            _add(report, labels, found)
            wrong += wrong_texts(found)
    size = len(tokenizer.vocabulary())
    report.notes.append(
        f"a guess's whole distribution as fp32 would be {32 * size:,} bits: "
        + ", ".join(f"{32 * size / rate / 1e3:.2g} s at {rate} kbit/s" for rate in arguments.rates)
    )
    report.notes.append(NOTES)
    return wrong


def wrong_texts(found: Mapping[str, Sequence[Run]]) -> int:
    """How many texts of same-token, with any budget, are not the server's own."""
    return sum(
        own != alone
        for name, runs in found.items()
        if name.startswith("same-token")
        for run, other in zip(runs, found[SERVER_ALONE], strict=True)
        for own, alone in zip(run.texts, other.texts, strict=True)
    )


def _links(arguments: argparse.Namespace) -> Iterator[tuple[int, int, float]]:
    yield from itertools.product(arguments.rates, arguments.round_trips, arguments.temperatures)


def _settings(arguments: argparse.Namespace) -> Iterator[tuple[str, EdgeSettings]]:
    """The devices that are compared, by name."""
    for mode, budget in itertools.product(arguments.modes, arguments.budgets):
        plain = EdgeSettings(mode=mode, budget_bits=budget, thrift=arguments.thrift)
        ending = f", {budget} bits" if len(arguments.budgets) > 1 else ""
        if mode == "ksqs":
            for size in arguments.sizes:
                yield f"ksqs {size}{ending}", replace(plain, size=size)
        elif mode == "csqs":
            for alpha in arguments.alphas:
                yield f"csqs {alpha:g}{ending}", replace(plain, alpha=alpha)
        else:
            yield f"{mode}{ending}", plain


async def _alone(link: ShapedLink, requests: Sequence[Request]) -> Run:
    """A plain client's streamed completions, one after the other."""
    texts, firsts = [], []
    started = time.perf_counter()
    client = Client(f"http://127.0.0.1:{link.port}", keep=False)  # thin links outlast keep-alive
    for request in requests:
        stream = IdStream()
        body = {
            **completion_fields(request.parameters),
            "prompt": request.prompt_ids,
            "stream": True,
            "return_token_ids": True,
        }
        answer = await client.post("/v1/completions", body, stream)
        if fault := fault_of(answer, stream):
            raise RuntimeError(fault)
        firsts.append(stream.pieces[0] - answer.began)
        texts.append(tuple(stream.ids))
    client.close()
    return Run(tuple(texts), time.perf_counter() - started, float(np.mean(firsts)), link)


class IdStream(StreamedAnswer):
    """One that notes the ids, too."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []

    def take_choice(self, choice: dict[str, object], now: float) -> None:
        super().take_choice(choice, now)
        ids = choice.get("token_ids")
        assert isinstance(ids, list)
        self.ids.extend(ids)


async def _drafted(client: EdgeClient, link: ShapedLink, requests: Sequence[Request]) -> Run:
    """The device's texts, one after the other."""
    client.start()
    while client.away is not None:
        if client.failure is not None:
            raise RuntimeError(client.failure)
        await asyncio.sleep(0.01)
    link.reset()
    texts, firsts = [], []
    started = time.perf_counter()
    for request in requests:
        asked = time.perf_counter()
        stream, first, ended = client.submit([request]), 0.0, False
        said: list[int] = []
        while not ended:
            for event in await stream.arrived():
                first = first or time.perf_counter() - asked
                said.extend(event.token_ids)
                if event.error is not None:
                    raise RuntimeError(event.error)
                ended = event.finish_reason is not None
        texts.append(tuple(said))
        firsts.append(first)
    seconds = time.perf_counter() - started
    counted = client.statistics
    await client.stop()
    return Run(
        tuple(texts),
        seconds,
        float(np.mean(firsts)),
        link,
        counted,
    )


def _add(report: Report, labels: CaseLabels, found: dict[str, list[Run]]) -> None:
    times = {name: [1e3 * r.seconds / r.tokens for r in runs] for name, runs in found.items()}
    report.add(labels, TIME, times, ours=next(name for name in found if name != SERVER_ALONE))
    for name, runs in found.items():
        figures: dict[Measure, list[float]] = {
            FIRST: [1e3 * r.first for r in runs],
            UP: [8 * r.link.up.bytes / r.tokens for r in runs],
            DOWN: [8 * r.link.down.bytes / r.tokens for r in runs],
            LATE: [1e3 * float(np.median(r.link.up.late + r.link.down.late)) for r in runs],
        }
        counted = [(r, r.counted) for r in runs if r.counted is not None]
        if counted:
            figures |= _of_device(counted)
        for measured, values in figures.items():
            report.add(labels, measured, {name: values})
        if name != SERVER_ALONE:
            ratio = paired_ratio(times[name], times[SERVER_ALONE], higher_is_better=False)
            report.notes.append(f"{_told(labels)}: {name} takes {1 / ratio:.2f}x {SERVER_ALONE}")


def _of_device(counted: Sequence[tuple[Run, EdgeStatistics]]) -> dict[Measure, list[float]]:
    seconds: dict[str, list[float]] = {
        "draft": [s.draft_seconds for _, s in counted],
        "encode": [s.edge_encode_seconds for _, s in counted],
        "uplink": [r.link.up.waited for r, _ in counted],
        "verify": [float(np.sum(r.link.answers)) for r, _ in counted],
        "downlink": [r.link.down.waited for r, _ in counted],
    }
    tested = [(s.draft_accepted_tokens, s.edge_rejections) for _, s in counted]
    return {
        GUESSES: [s.edge_guess_bits / max(1, s.draft_tokens) for _, s in counted],
        LENGTH: [s.generated_tokens / max(1, s.edge_answers) for _, s in counted],
        RESAMPLED: [100 * wrong / max(1, stood + wrong) for stood, wrong in tested],
        **{
            SPLIT[name]: [1e3 * v / r.tokens for v, (r, _) in zip(values, counted, strict=True)]
            for name, values in seconds.items()
        },
    }


def _told(labels: CaseLabels) -> str:
    return f"{labels['kbit/s']} kbit/s, {labels['round trip ms']} ms, T {labels['temperature']}"
