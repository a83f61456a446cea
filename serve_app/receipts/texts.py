"""Is the text of a reply that of the tokens in its receipt?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lexshard.actors.receipts.document import Receipt
from lexshard.actors.receipts.stop_rule import Spelling
from lexshard.actors.text.detokenizer import Detokenizer
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.tools.reply_parser import ReplyParser

Tokens = list[tuple[int, int]]  # each with the length of the text up to its end


def told_text(choice: Mapping[str, Any]) -> tuple[str, str] | None:
    """The text and the reasoning of a whole ``choice``; None where there is none to compare: in
    pieces of streams, calls of tools, replies of other protocols."""
    text, message = choice.get("text"), choice.get("message")
    if isinstance(text, str) and message is None:
        return text, ""
    if text is not None or not isinstance(message, dict) or message.get("tool_calls"):
        return None
    return str(message.get("content") or ""), str(message.get("reasoning") or "")


def is_text_of(
    told: tuple[str, str], receipt: Receipt, tokenizer: ModelTokenizer, *, whole: bool
) -> bool | None:
    """Whether a server may have ``told`` the tokens of ``receipt`` so; None for what may be the end
    of a stream, where it need not be the ``whole``. What the receipt does not say of its texts may
    be either: whether special tokens are shown, and the token of the end."""
    is_end = False
    for text, tokens in _texts(receipt, tokenizer):
        if told in _readings(text, tokens, tokenizer):
            return True
        before = told[0][: len(told[0]) - len(text)]
        if told == (before + text, "") and _is_prompt(before, receipt.prompt_ids, tokenizer):
            return True
        is_end = is_end or (not whole and text.endswith(told[0]))
    return None if is_end else False


def _texts(receipt: Receipt, tokenizer: ModelTokenizer) -> Iterator[tuple[str, Tokens]]:
    rule, ids = receipt.stop, receipt.output_ids
    by_token = receipt.finish_reason == "stop" and not isinstance(receipt.stop_reason, str)
    every, visible = tokenizer.token_bytes, tokenizer.visible_token_bytes
    for spelling in (visible, every, tokenizer.marked_token_bytes):
        for hidden in {by_token, False} if rule is None else {by_token and not rule.include}:
            made = Detokenizer(spelling)
            if rule is not None:
                least = receipt.parameters().min_tokens
                made = Spelling(every, visible).detokenizer(rule, least)
            tokens: Tokens = []
            for token_id in ids[: len(ids) - hidden]:
                stopped = made.push(token_id)
                tokens.append((token_id, made.decoded_length))
                if stopped:
                    break
            yield made.finish(), tokens
        if rule is not None:
            return


def _readings(text: str, said: Tokens, tokenizer: ModelTokenizer) -> Iterator[tuple[str, str]]:
    yield text, ""
    if tokenizer.reply_format.reasoning is not None:
        for amid in (False, True):
            parser = ReplyParser(tokenizer.reply_format, {}, amid)
            for token_id, length in said:
                parser.token(token_id, length)
            spoken = parser.feed(text, last=True)
            yield spoken.content, spoken.reasoning


def _is_prompt(before: str, ids: Sequence[int], tokenizer: ModelTokenizer) -> bool:
    """Whether ``before`` is an echo of the prompt, as the client wrote it or as its ids read."""
    if any(tuple(tokenizer.encode(before, special)) == tuple(ids) for special in (False, True)):
        return True
    spellings = tokenizer.token_bytes, tokenizer.visible_token_bytes
    return any(
        before == b"".join(map(each.__getitem__, ids)).decode(errors="replace")
        for each in spellings
    )
