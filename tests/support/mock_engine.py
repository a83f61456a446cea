"""An engine that says what the test wrote, and a byte-level tokenizer built on the spot."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.faults import LoggedFault
from lexshard.actors.messages import (
    Certificate,
    Drafts,
    EngineStatistics,
    Request,
    SequenceEvent,
    SequenceTiming,
    TokenLogprobs,
    TokenOrigin,
)
from lexshard.actors.role import RunningRole, here
from lexshard.actors.text.token_bytes import byte_level_alphabet
from lexshard.cluster.engine.journal import JournalStream
from lexshard.serve_app.openai.tokenization import ModelTokenizer

EOS = 256
BOS = 257
VOCABULARY = 264  # more rows than the tokenizer has tokens, as padded models do

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system message must come first') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(
    chat_template: str | dict[str, str] | None = CHAT_TEMPLATE,
) -> ModelTokenizer:
    """Token id = byte; 256 ends a sequence, 257 begins one."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|begin|>"
    )
    wrapped.chat_template = chat_template
    return ModelTokenizer(wrapped)


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@dataclass
class Script:
    """What one sequence does: ``steps`` of tokens, then ``finish_reason``.

    ``hangs`` waits after the steps until cancelled; ``error`` fails instead of finishing,
    ``refused`` through the request's own fault.
    """

    steps: Sequence[Sequence[int]]
    finish_reason: str = "stop"
    stop_reason: int | None = None
    hangs: bool = False
    error: str | None = None
    refused: bool = False
    cached_tokens: int = 0
    seconds_per_step: float = 0.0


def spell(text: str, **options: object) -> Script:
    """A script that says ``text`` byte by byte and then ends with EOS."""
    return Script([*((byte,) for byte in text.encode()), (EOS,)], **options)  # type: ignore[arg-type]


def label_entry(labels: tuple[int, ...], token_id: int) -> TokenLogprobs:
    """All of ``labels`` are as likely."""
    likely = -math.log(len(labels))
    return TokenLogprobs(token_id, likely, 1, tuple((label, likely) for label in labels))


def logprob_entry(token_id: int, count: int) -> TokenLogprobs:
    """A made-up but consistent entry: the token has rank 2, the best is the next id."""
    top = [((token_id + 1) % 256, -0.25), (token_id, -1.5)]
    top += [((token_id + 2 + i) % 256, -float("inf")) for i in range(count)]
    told = tuple(top[:count])
    return TokenLogprobs(token_id, -1.5, 2, told, 8.5, tuple(each + 10 for _, each in told))


def certificate(token_id: int, position: int) -> Certificate:
    """A made-up one that tells which token of the output it belongs to."""
    return Certificate(
        need="top1",
        guarantee="deterministic",
        tier="int4",
        rescored_rows=token_id,
        bytes_read=position,
        opened_share=token_id / VOCABULARY,
        tightness=0.75,
    )


def origin(token_id: int) -> TokenOrigin:
    """A made-up one that tells which token it belongs to."""
    return TokenOrigin("mock") if token_id % 2 else TokenOrigin(rejected=token_id + 1)


class MockStream(JournalStream):
    """Closing it cancels what still plays."""

    def __init__(self, engine: MockEngine, requests: Sequence[Request]) -> None:
        def close(_: JournalStream) -> None:
            for request in requests:
                engine.cancel(request.request_id)

        super().__init__([request.request_id for request in requests], close)


@dataclass
class MockEngine:
    """Plays ``script(request)`` for every sequence; remembers requests and cancellations."""

    script: Callable[[Request], Script] = lambda request: spell("Hello")
    max_model_len: int = 4096
    kv_tokens: int = 100_000
    default_sampling: dict[str, float] = field(default_factory=dict)
    health_reason: str | None = None
    failure: str | None = None
    restarts: int = 0
    statistics: EngineStatistics = field(
        default_factory=lambda: EngineStatistics(steps=7, running=2, kv_blocks_total=64)
    )
    requests: list[Request] = field(default_factory=list)
    drafts: list[Drafts] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    stopped: bool = False
    timing: SequenceTiming | None = None

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def roles(self) -> list[RunningRole]:
        return [RunningRole("body", 0, here(), "cpu", "mock")]

    async def faults(self) -> list[LoggedFault]:
        return [LoggedFault(1.0, "a sampler is lost and will be replaced: it was killed")]

    @property
    def ready(self) -> bool:
        return self.health_reason is None

    @property
    def information(self) -> EngineInformation:
        return EngineInformation(
            model="mock",
            dtype="float32",
            device="cpu",
            body="mock",
            head="dense",
            batch_invariant=True,
            threads=1,
            max_model_len=self.max_model_len,
            vocabulary_size=VOCABULARY,
            eos_token_ids=(EOS,),
            default_sampling=self.default_sampling,
            kv_blocks=self.kv_tokens // 16,
            kv_tokens=self.kv_tokens,
            kv_bytes=0,
            parameters=0,
            process_id=0,
        )

    def submit(self, requests: Sequence[Request]) -> MockStream:
        stream = MockStream(self, requests)
        self.requests.extend(requests)
        for request in requests:
            self._tasks[request.request_id] = asyncio.ensure_future(self._play(request, stream))
        return stream

    def draft(self, drafts: Drafts) -> None:
        self.drafts.append(drafts)

    def cancel(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is not None and not task.done():
            task.cancel()
            self.cancelled.append(request_id)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        self.stopped = True

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self._tasks.values())

    async def _play(self, request: Request, stream: MockStream) -> None:
        script = self.script(request)
        parameters = request.parameters
        left = parameters.max_tokens
        for i, step in enumerate(script.steps):
            if script.seconds_per_step:
                await asyncio.sleep(script.seconds_per_step)
            tokens = tuple(step[:left])
            left -= len(tokens)
            last = i + 1 == len(script.steps) and not (script.hangs or script.error)
            reason = script.finish_reason if last else None
            if left == 0 and reason is None:
                reason = "length"
            logprobs: tuple[TokenLogprobs, ...] = ()
            if parameters.logprobs is not None:
                logprobs = tuple(logprob_entry(token, parameters.logprobs) for token in tokens)
                if parameters.labels and parameters.allowed_ids is not None:
                    logprobs = tuple(map(partial(label_entry, parameters.allowed_ids), tokens))
            certificates: tuple[Certificate, ...] = ()
            if parameters.certificate:
                begin = parameters.max_tokens - left - len(tokens)
                certificates = tuple(certificate(t, begin + j) for j, t in enumerate(tokens))
            origins = tuple(map(origin, tokens)) if parameters.draft else ()
            scores = None
            if i == 0 and parameters.prompt_logprobs is not None:
                scores = (
                    None,
                    *(logprob_entry(t, parameters.prompt_logprobs) for t in request.prompt_ids[1:]),
                )
            stream.put(
                SequenceEvent(
                    request.request_id,
                    request.choice,
                    tokens,
                    logprobs,
                    scores,
                    finish_reason=reason,  # type: ignore[arg-type]
                    stop_reason=script.stop_reason if last else None,
                    cached_tokens=script.cached_tokens,
                    certificates=certificates,
                    origins=origins,
                    timing=self.timing if i == 0 or reason is not None else None,
                )
            )
            if reason is not None:
                return
            await asyncio.sleep(0)
        if script.error is not None:
            stream.put(
                SequenceEvent(
                    request.request_id,
                    request.choice,
                    (),
                    finish_reason="error",
                    error=script.error,
                    refused=script.refused,
                )
            )
            return
        await asyncio.Event().wait()
