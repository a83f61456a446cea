"""Log-probabilities in the three shapes clients know."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from lexshard.actors.messages import TokenLogprobs
from lexshard.actors.text.token_bytes import TokenBytes, token_text

LOWEST_LOGPROB = -9999.0
# How far ahead of its place a token of a prompt is looked for, behind some that are not there.
MOST_SKIPPED = 4096


def clamp(logprob: float) -> float:
    """JSON has no infinity."""
    return max(float(logprob), LOWEST_LOGPROB)


class LogprobsFormatter:
    """``tokens_as_ids`` writes tokens as ``token_id:5`` instead of their text."""

    def __init__(self, token_bytes: TokenBytes, tokens_as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._tokens_as_ids = tokens_as_ids

    def token(self, token_id: int) -> str:
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        return token_text(self._token_bytes[token_id])

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._token_bytes[token_id])

    def candidates(self, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any]]:
        """Of each token what else might have been said there, by exact logits."""
        return [
            self._candidate(entry.token_id, entry.logit, entry.logprob)
            | {"rank": entry.rank}
            | {
                "top": [
                    self._candidate(token_id, logit, logprob)
                    for (token_id, logprob), logit in zip(entry.top, entry.top_logits, strict=True)
                ]
            }
            for entry in entries
            if entry is not None
        ]

    def _candidate(self, token_id: int, logit: float, logprob: float) -> dict[str, Any]:
        return {
            "token_id": token_id,
            "bytes": self.bytes_of(token_id),
            "logit": clamp(logit),
            "logprob": clamp(logprob),
        }

    def completion(
        self, entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], first_id: int
    ) -> dict[str, Any]:
        """The completions shape. ``first_id`` is the token of an entry that is None: the first
        of an echoed prompt, which nothing predicts."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        for entry in entries:
            if entry is None:
                tokens.append(self.token(first_id))
                token_logprobs.append(None)
                top_logprobs.append(None)
                continue
            token = self.token(entry.token_id)
            tokens.append(token)
            token_logprobs.append(clamp(entry.logprob))
            top = {token: clamp(entry.logprob)}  # first, as vLLM has it
            for token_id, logprob in entry.top:
                top.setdefault(self.token(token_id), clamp(logprob))
            top_logprobs.append(top)
        return {
            "text_offset": list(offsets),
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }

    def prompt_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Where in the ``text`` of a prompt its tokens begin, in characters. Some may not be in it:
        one that every prompt begins with, special ones where the text is made of ids, those of
        other characters that the tokenizer takes for it, and the space before the first word."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        offsets: list[int] = []
        end = missing = 0
        for token_id in token_ids:  # a hundred thousand may be
            piece = decode(self._token_bytes[token_id])
            if not text.startswith(piece, end) and text.startswith(piece.removeprefix(" "), end):
                piece = piece.removeprefix(" ")
            begin = text.find(piece, end, end + len(piece) + missing)
            if begin < 0:
                offsets.append(end)
                missing = min(missing + 2 * len(piece), MOST_SKIPPED)
            else:
                offsets.append(begin)
                end = begin + len(piece)
                missing = 0 if piece else missing
        return offsets

    def chat(self, entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The chat shape."""
        return {
            "content": [
                self._chat_token(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._chat_token(*pair) for pair in entry.top]}
                for entry in entries
                if entry is not None
            ],
            "refusal": None,
        }

    def prompt(
        self, entries: Sequence[TokenLogprobs | None]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """The ``prompt_logprobs`` shape: per position, id to logprob, rank and token."""
        return [None if entry is None else self._ranked(entry) for entry in entries]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token(token_id),
            "logprob": clamp(logprob),
            "bytes": self.bytes_of(token_id),
        }

    def _ranked(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        ranked = [
            (token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)
        ]
        return {
            str(token_id): {
                "logprob": clamp(logprob),
                "rank": rank,
                "decoded_token": token_text(self._token_bytes[token_id]),
            }
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }
