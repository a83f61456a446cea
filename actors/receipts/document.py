"""A receipt: everything that the tokens of one reply follow from, and a digest of each of them.

The digest of a token binds what the receipt says of model, options, seed and prompt to the token,
to its place and to its canonical logit, bit by bit. Who has only the text can write no such digest:
it takes the logit, and so the model. `actors.receipts.replay` computes all of it anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any, Literal

import msgspec

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.messages import FinishReason, SamplingParameters
from lexshard.actors.receipts.stop_rule import StopRule

VERSION = 3
# Counts what changes a logit's bits: another order of sums, another rounding.
ARITHMETIC_VERSION = 1
DIGEST_BYTES = 8
# What says nothing of tokens, only of what is told of them; and the seed, which stands by itself.
_NOT_OPTIONS = frozenset(
    {"seed", "logprobs", "prompt_logprobs", "certificate", "draft", "receipt", "labels"}
)
_TOKEN = struct.Struct("<qqf")  # place, id, logit


class ReceiptError(ValueError):
    """What stands there is no receipt; why."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What the bits of logits depend on beside the weights. ``version`` counts changes of the
    arithmetic itself (`lexshard.kernels`). ``processor``, a CPU's instructions or a GPU's name, is
    compared where bits depend on it alone: see docs/receipts.md."""

    version: int
    dtype: Literal["float32", "bfloat16"]
    body: str
    processor: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made a reply: SHA-256 of the model's weights and configuration and of its tokenizer, the
    arithmetic, and the ids that end its texts, which files beside these may name."""

    model: str
    tokenizer: str
    arithmetic: Arithmetic
    eos_token_ids: tuple[int, ...]


def made_by(hashes: tuple[str, str], told: EngineInformation) -> Provenance:
    """What makes replies of a model whose files have these ``hashes`` (`receipts.hashes`), as an
    engine tells of itself."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if told.dtype == "bfloat16" else "float32"
    arithmetic = Arithmetic(ARITHMETIC_VERSION, dtype, told.body, told.processor)
    return Provenance(*hashes, arithmetic, told.eos_token_ids)


@dataclass(frozen=True, slots=True)
class Receipt:
    """``options`` are those of `SamplingParameters` that tokens depend on, all of them, resolved.

    ``digests`` are those of ``output_ids`` in order, and one of the end. ``header`` is that of all
    that stands before the output. ``signature`` is the server's, if it has a key.
    """

    version: int
    made_by: Provenance
    seed: int
    choice: int
    options: dict[str, Any]
    stop: StopRule | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    header: str
    digests: tuple[bytes, ...]
    signature: dict[str, str] | None = None

    def parameters(self) -> SamplingParameters:
        """How the reply was sampled, and asking for what a replay compares.

        Raises ReceiptError for options that are none.
        """
        known = {field.name for field in fields(SamplingParameters)} - _NOT_OPTIONS
        if self.options.keys() != known:
            odd = sorted(self.options.keys() ^ known)
            raise ReceiptError(f"its options are not those of this version: {', '.join(odd)}")
        given = {**self.options, "seed": self.seed, "receipt": True}
        try:
            return msgspec.convert(given, SamplingParameters)
        except msgspec.ValidationError as error:
            raise ReceiptError(f"its options are none: {error}") from error

    def chain(self) -> DigestChain:
        """What makes the digests anew, from what the receipt says of itself."""
        options = options_of(self.parameters())  # 1 and 1.0 are the same: some clients write 1
        return DigestChain(
            self.made_by, self.seed, self.choice, options, self.stop, self.prompt_ids
        )

    def unsigned(self) -> dict[str, Any]:
        """As JSON has it, without its signature."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told["made_by"] = asdict(self.made_by)
        told["stop"] = None if self.stop is None else asdict(self.stop)
        told["options"] = options_of(self.parameters())
        told["seed"] = str(self.seed)  # not every client's numbers have 64 bits
        told["digests"] = base64.b64encode(b"".join(self.digests)).decode()
        del told["signature"]
        return told

    def as_json(self) -> dict[str, Any]:
        """What goes to clients."""
        told = self.unsigned()
        return told if self.signature is None else {**told, "signature": self.signature}


class DigestChain:
    """Digests of the tokens of one reply, as they come."""

    def __init__(
        self,
        made_by: Provenance,
        seed: int,
        choice: int,
        options: Mapping[str, Any],
        stop: StopRule | None,
        prompt_ids: Sequence[int],
    ) -> None:
        head = {
            "version": VERSION,
            "made_by": asdict(made_by),
            "seed": seed,
            "choice": choice,
            "options": options,
            "stop": None if stop is None else asdict(stop),
            "prompt_ids": list(prompt_ids),
        }
        self._key = hashlib.blake2b(canonical(head), digest_size=32).digest()
        self.digests: list[bytes] = []

    @property
    def header(self) -> str:
        """A name for all that stands before the output."""
        return self._key[:DIGEST_BYTES].hex()

    def add(self, token_ids: Sequence[int], logits: Sequence[float]) -> None:
        """Those of more tokens, whose canonical logits are ``logits``, NaN where one was forced."""
        told = enumerate(zip(token_ids, logits, strict=True), len(self.digests))
        self._add(
            _TOKEN.pack(place, token_id, math.nan if math.isnan(logit) else logit)
            for place, (token_id, logit) in told
        )

    def end(self, finish_reason: FinishReason, stop_reason: int | str | None) -> bytes:
        """The digest of the end."""
        self._add([canonical([len(self.digests), finish_reason, stop_reason])])
        return self.digests[-1]

    def _add(self, contents: Iterable[bytes]) -> None:
        key, blake2b = self._key, hashlib.blake2b
        self.digests += [
            blake2b(each, digest_size=DIGEST_BYTES, key=key).digest() for each in contents
        ]


def options_of(parameters: SamplingParameters) -> dict[str, Any]:
    """Those that tokens depend on, as JSON has them."""
    told = asdict(parameters)
    return {name: _thawed(value) for name, value in told.items() if name not in _NOT_OPTIONS}


def canonical(told: Any) -> bytes:
    """The one way to write ``told`` as JSON."""
    return json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def read_receipt(told: Any) -> Receipt:
    """The receipt that a decoded JSON object is.

    Raises ReceiptError where it is none.
    """
    if not isinstance(told, dict):
        raise ReceiptError("it is no JSON object")
    if told.get("version") != VERSION:
        raise ReceiptError(f"its version is {told.get('version')!r}; this one reads {VERSION}")
    names = {field.name for field in fields(Receipt)}
    odd = sorted((names ^ told.keys()) - {"signature"})
    if odd:
        raise ReceiptError(f"it lacks, or has beside what it may have: {', '.join(map(str, odd))}")
    seed = told["seed"]
    if not (isinstance(seed, str) and seed.isascii() and seed.isdecimal() and len(seed) < 21):
        raise ReceiptError("its seed is no whole number in a text")
    try:
        content = base64.b64decode(told["digests"], validate=True)
        parts = range(0, len(content), DIGEST_BYTES)
        digests = tuple(content[start : start + DIGEST_BYTES] for start in parts)
        receipt = msgspec.convert({**told, "seed": int(seed), "digests": digests}, Receipt)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ReceiptError(f"it is none: {error}") from error
    _check(receipt)
    return receipt


def _check(receipt: Receipt) -> None:
    if receipt.finish_reason not in ("stop", "length"):
        raise ReceiptError(f"its reply ended with {receipt.finish_reason!r}")
    if not 0 <= receipt.choice < 2**31 or receipt.seed >= 2**64:
        raise ReceiptError("its choice or seed is none")
    if not receipt.prompt_ids:
        raise ReceiptError("it has no prompt")
    if len(receipt.digests) != len(receipt.output_ids) + 1:
        raise ReceiptError(
            f"it has {len(receipt.digests)} digests of {len(receipt.output_ids)} tokens and an end"
        )
    if receipt.stop is not None and (wrong_rule := receipt.stop.wrong()):
        raise ReceiptError(f"its stop strings are none: {wrong_rule}")
    asked = receipt.parameters()
    amounts = [amount for _, amount in asked.logit_bias]
    ranges = {
        "temperature": 0.0 <= asked.temperature <= 100.0,
        "top_k": asked.top_k >= 0,
        "top_p": 0.0 < asked.top_p <= 1.0,
        "min_p": 0.0 <= asked.min_p <= 1.0,
        "repetition_penalty": 0.01 <= asked.repetition_penalty <= 100.0,
        "presence_penalty": abs(asked.presence_penalty) <= 2.0,
        "frequency_penalty": abs(asked.frequency_penalty) <= 2.0,
        "logit_bias": all(abs(amount) <= 100.0 for amount in amounts),
        "bad_words": all(asked.bad_words),
        "max_tokens": len(receipt.output_ids) <= asked.max_tokens < 2**31
        and bool(receipt.output_ids) == bool(asked.max_tokens),
        "min_tokens": 0 <= asked.min_tokens <= asked.max_tokens,
        "allowed_ids": asked.allowed_ids is None or asked.grammar is None,
    }
    wrong = [name for name, fits in ranges.items() if not fits]
    if wrong:
        raise ReceiptError(f"its options are none: {', '.join(wrong)}")


def check_fits(receipt: Receipt, vocabulary_size: int, context: int) -> None:
    """Raises ReceiptError for what a model of so many tokens, and so many of context, cannot do."""
    asked = receipt.parameters()
    ids = {
        *receipt.prompt_ids,
        *receipt.output_ids,
        *(token_id for token_id, _ in asked.logit_bias),
        *chain.from_iterable(asked.bad_words),
        *(asked.allowed_ids or ()),
        *asked.stop_token_ids,
        *(() if receipt.stop is None else receipt.stop.shown_ids),
    }
    if not (min(ids) >= 0 and max(ids) < vocabulary_size and asked.top_k < vocabulary_size):
        raise ReceiptError(f"it has tokens beyond a vocabulary of {vocabulary_size}")
    if len(receipt.prompt_ids) + asked.max_tokens > context:
        told = f"{len(receipt.prompt_ids)} tokens and up to {asked.max_tokens} behind them"
        raise ReceiptError(f"it needs a context of {told}; here are {context}")


def _thawed(value: Any) -> Any:
    return [_thawed(each) for each in value] if isinstance(value, tuple) else value
