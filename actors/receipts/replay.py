"""A reply is made again from its receipt: its tokens are guesses, which the engine verifies.

So a replay reads prompt and output many tokens at a time, and every token of it is drawn by the
engine itself, with its grammar, its penalties and its noise: whatever draws another one tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lexshard.actors.messages import Drafting, Drafts, Request, SequenceEvent
from lexshard.actors.receipts.document import DigestChain, Provenance, Receipt, ReceiptError
from lexshard.actors.receipts.stop_rule import Spelling

# Guesses of one step.
AT_ONCE = 64
# Bodies of our own products; torch's sums are others on another processor.
BITS_OF_EVERY_MACHINE = ("fused", "parallel")
# Processors by this name sum products of bfloat16 in another order than all others.
MATRICES = "AMX"

Reason = Literal["altered", "other model", "other tokenizer", "other arithmetic", "not its own"]


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """Whether a reply is what its receipt says. ``equal`` of its tokens came out as they stand
    there; where not all did, the next one is ``found`` where ``expected`` was drawn. ``reason`` is
    None where everything is right, else ``explanation`` says more."""

    tokens: int
    equal: int
    reason: Reason | None = None
    explanation: str = ""
    expected: int | None = None
    found: int | None = None

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return self.reason is None

    def as_json(self) -> dict[str, Any]:
        """As servers and the command tell it."""
        return {
            "equal": self.right,
            "tokens": self.tokens,
            "equal_tokens": self.equal,
            "reason": self.reason,
            "explanation": self.explanation,
            "expected_token_id": self.expected,
            "found_token_id": self.found,
        }


class Replay:
    """One receipt on its way through an engine that is ``here``.

    ``spelling`` is the model's; a receipt without stop strings is replayed without it. `request` is
    submitted; then come the `Drafts` that `begin` and `take` return, until there is a `verdict`.
    The request is cancelled then, if it has not ended. So far ``equal`` of its tokens have come out
    as they stand there.
    """

    def __init__(
        self,
        receipt: Receipt,
        here: Provenance,
        spelling: Spelling | None,
        name: str,
        priority: int = 0,
    ) -> None:
        self.receipt = receipt
        self.verdict: ReplayVerdict | None = None
        self.request = Request(
            name,
            receipt.choice,
            receipt.prompt_ids,
            receipt.parameters(),
            priority,
            # Its blocks are computed here, whatever others have left in the cache.
            cache_salt=f"replay {name}",
            drafting=Drafting("client", "same-token"),
        )
        self._here = here
        self._chain: DigestChain = receipt.chain()
        self._text = None
        if receipt.stop is not None and spelling is not None:
            least = self.request.parameters.min_tokens
            self._text = spelling.detokenizer(receipt.stop, least)
        self.equal = 0
        self._asked = 0

    def begin(self) -> Drafts | None:
        """The first guesses; None where there is nothing to replay: there is a verdict.

        Raises ReceiptError where it takes a tokenizer, and there is none.
        """
        if self._text is None and self.receipt.stop is not None:
            raise ReceiptError("it has stop strings, and this model has no tokenizer")
        if self._chain.header != self.receipt.header:
            self._settle("altered", "prompt, options, seed or hashes are not those it was made for")
            return None
        if not self.receipt.output_ids:
            self._finish()
            return None
        return self._next()

    def take(self, event: SequenceEvent) -> Drafts | None:
        """What the engine has drawn; the next guesses, None where there is a verdict."""
        if event.finish_reason in ("error", "abort"):
            self._settle("not its own", event.error or "the engine gave up")
            return None
        output, digests = self.receipt.output_ids, self.receipt.digests
        drawn, left = len(event.token_ids), len(output) - self.equal
        # The engine knows nothing of stop strings, and goes on.
        self._chain.add(event.token_ids[:left], event.logits[:left])
        for number, token_id in enumerate(event.token_ids[:left], 1):
            place = self.equal
            digest = self._chain.digests[place]
            if token_id != output[place]:
                self._differs(place, token_id, digest == digests[place])
                return None
            if digest != digests[place]:
                self._wrong_digest(place)
                return None
            self.equal += 1
            ends = number == drawn and event.finish_reason == "stop"
            if self._stops(token_id, ends) and self.equal < len(output):
                self._wrong_end(f"a stop string ends the reply after {self.equal} tokens")
                return None
        if self.equal < len(output):
            if event.finish_reason is None:
                return self._next()
            self._wrong_end(f"the reply ends after {self.equal} tokens")
            return None
        if drawn > left and self._stopped_by is None:  # a reply ends with the last of its tokens
            self._wrong_end(f"the reply goes on after {self.equal} tokens")
            return None
        self._finish(event)
        return None

    def _stops(self, token_id: int, ends: bool) -> bool:
        """Whether a stop string is complete with this token. The one with which the model
        ``ends`` is no text unless that was asked for."""
        text, rule = self._text, self.receipt.stop
        if text is None or rule is None or (ends and not rule.include):
            return False
        return text.push(token_id)

    @property
    def _stopped_by(self) -> str | None:
        return None if self._text is None else self._text.stop_string

    def _next(self) -> Drafts:
        said, output = self.equal, self.receipt.output_ids
        self._asked += 1
        return Drafts(
            self.request.request_id,
            self.request.choice,
            len(self.receipt.prompt_ids) + said,
            output[said : said + AT_ONCE],
            number=self._asked,
        )

    def _differs(self, place: int, token_id: int, altered: bool) -> None:
        own = self.receipt.output_ids[place]
        if altered:
            self._settle("altered", "the digest is that of the token that was drawn", token_id, own)
        else:
            told = "another token is drawn here" + self._why()
            self._settle(self._cause(), told, token_id, own)

    def _wrong_digest(self, place: int) -> None:
        own = self.receipt.output_ids[place]
        told = "the token is right, its digest is not that of the logit computed here"
        self._settle(self._cause(), told + self._why(), own, own)

    def _finish(self, event: SequenceEvent | None = None) -> None:
        """Every token was right. The end is, if its digest is, and if it ends here, too."""
        receipt = self.receipt
        own = receipt.finish_reason, receipt.stop_reason
        if self._chain.end(*own) != receipt.digests[-1]:
            self._settle("altered", "its end is not that which it was made for")
            return
        drawn: tuple[object, object] = ("length", None)  # of a reply that was to have no tokens
        if self._stopped_by is not None:
            drawn = "stop", self._stopped_by
        elif event is not None:
            drawn = event.finish_reason, event.stop_reason
        if drawn != own:
            self._wrong_end("the reply does not end here with {!r} and {!r}".format(*own))
        elif self._cause() in ("other model", "other tokenizer"):
            self._settle(self._cause(), "every token is right" + self._why())
        else:
            self.verdict = ReplayVerdict(len(receipt.output_ids), self.equal)

    def _wrong_end(self, told: str) -> None:
        if self._ends_differ():
            self._settle("other model", told + self._why())
        elif self.receipt.stop is not None and self._cause() == "other tokenizer":
            self._settle("other tokenizer", told + self._why())
        else:
            self._settle("altered", told)

    def _cause(self) -> Reason:
        made, here = self.receipt.made_by, self._here
        if made.model != here.model or self._ends_differ():
            return "other model"
        if made.tokenizer != here.tokenizer:
            return "other tokenizer"
        own, other = made.arithmetic, here.arithmetic
        if (own.version, own.dtype, own.body) != (other.version, other.dtype, other.body):
            return "other arithmetic"
        if own.processor != other.processor and (
            own.body not in BITS_OF_EVERY_MACHINE or self._sums_differ()
        ):
            return "other arithmetic"
        return "not its own"

    def _ends_differ(self) -> bool:
        """Whether other tokens end the texts of one of the two."""
        return self.receipt.made_by.eos_token_ids != self._here.eos_token_ids

    def _sums_differ(self) -> bool:
        """Whether one of the two summed products of bfloat16 as AMX does, and the other not."""
        own, other = self.receipt.made_by.arithmetic, self._here.arithmetic
        by_matrices = [each.processor == MATRICES for each in (own, other)]
        return own.dtype == "bfloat16" and by_matrices[0] != by_matrices[1]

    def _why(self) -> str:
        own, other = self.receipt.made_by.arithmetic, self._here.arithmetic
        told = f"; it was made with {_words(own)}, this is {_words(other)}"
        if own.body in BITS_OF_EVERY_MACHINE and self._sums_differ():
            needed = "amx" if own.processor == MATRICES else "avx512 or avx2"
            told += f": replay it with LEXSHARD_CPU={needed}"
        made, here = self.receipt.made_by, self._here
        model = "; the weights here are others than the receipt's"
        if made.model == here.model:
            ends = f"{[*here.eos_token_ids]}, in the receipt {[*made.eos_token_ids]}"
            model = f"; ids that end a text here are {ends}: compare generation_config.json"
        return {
            "other model": model,
            "other tokenizer": "; the tokenizer here is another than the receipt's",
            "other arithmetic": told,
        }.get(self._cause(), "; text, seed or options are not those of one reply of this model")

    def _settle(
        self, reason: Reason, told: str, expected: int | None = None, found: int | None = None
    ) -> None:
        tokens = len(self.receipt.output_ids)
        self.verdict = ReplayVerdict(tokens, self.equal, reason, told, expected, found)


def _words(arithmetic: object) -> str:
    return ", ".join(
        f"{name} {getattr(arithmetic, name)}" for name in ("version", "dtype", "body", "processor")
    )
