"""Streamed text equals decoded text, never splits a character, never shows a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lexshard.actors.text.detokenizer import Detokenizer, StopMatcher
from lexshard.actors.text.token_bytes import TokenBytes, byte_level_alphabet, token_text
from tests.support.mock_engine import BOS, EOS, byte_tokenizer, ids

TOKENIZER = byte_tokenizer()
TEXT = st.text(alphabet=st.sampled_from("abAB é漢🙂\n"), max_size=40)
STOPS = st.lists(st.text(alphabet="abAé漢", min_size=1, max_size=4), min_size=1, max_size=4)


def stream(text_bytes: bytes, detokenizer: Detokenizer) -> tuple[list[str], bool]:
    """The pieces released after each byte, and whether a stop string ended it."""
    pieces: list[str] = []
    for byte in text_bytes:
        stopped = detokenizer.push(byte)
        pieces.append(detokenizer.take())
        if stopped:
            return pieces, True
    pieces.append(detokenizer.finish())
    return pieces, False


@given(TEXT)
def test_streamed_text_is_the_text(text: str) -> None:
    pieces, _ = stream(text.encode(), Detokenizer(TOKENIZER.token_bytes))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.binary(max_size=60))
def test_any_bytes_stream_to_what_decoding_gives(content: bytes) -> None:
    pieces, _ = stream(content, Detokenizer(TOKENIZER.token_bytes))
    assert "".join(pieces) == content.decode(errors="replace") == TOKENIZER.decode(list(content))


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The definition: the stop string that is complete first, the longest of equals."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            longest = max(matching, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=300)
@given(TEXT, STOPS)
def test_stop_strings_cut_where_the_definition_says(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(TOKENIZER.token_bytes, stops)
    pieces, stopped = stream(text.encode(), detokenizer)
    expected = first_stop(text, stops)
    assert stopped == (expected is not None)
    assert "".join(pieces) == (text if expected is None else text[: expected[0]])
    assert detokenizer.stop_string == (None if expected is None else expected[1])


@given(TEXT, STOPS)
def test_a_stop_string_can_be_included(text: str, stops: list[str]) -> None:
    pieces, _ = stream(text.encode(), Detokenizer(TOKENIZER.token_bytes, stops, include_stop=True))
    expected = first_stop(text, stops)
    assert "".join(pieces) == (text if expected is None else text[: expected[0] + len(expected[1])])


def test_text_is_released_as_soon_as_no_stop_string_can_begin_in_it() -> None:
    pieces, _ = stream(b"ab abc", Detokenizer(TOKENIZER.token_bytes, ["abd"]))
    assert pieces == ["", "", "ab ", "", "", "abc", ""]


def test_stop_strings_lie_after_the_minimum_of_tokens() -> None:
    detokenizer = Detokenizer(TOKENIZER.token_bytes, ["b"], min_tokens=3)
    pieces, stopped = stream(b"abcabc", detokenizer)
    assert stopped
    assert "".join(pieces) == "abca"


def test_special_tokens_are_silent_unless_wanted() -> None:
    silent = Detokenizer(TOKENIZER.visible_token_bytes)
    loud = Detokenizer(TOKENIZER.token_bytes)
    for token_id in (BOS, *ids("hi"), EOS):
        silent.push(token_id)
        loud.push(token_id)
    assert silent.finish() == "hi"
    assert loud.finish() == "<|begin|>hi<|end|>"


def test_ids_beyond_the_tokenizer_are_empty() -> None:
    assert TOKENIZER.token_bytes[260] == b""


def test_matcher_is_linear_in_the_text() -> None:
    matcher = StopMatcher("a" * 1000 + "b")
    assert not any(matcher.push("a") for _ in range(20_000))
    assert matcher.push("b")


def test_every_byte_has_one_character() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())


def test_split_characters_are_told_as_bytes() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text("é".encode()[:1]) == "bytes:\\xc3"


def sentencepiece_like() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁wor": 2, "ld": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_sentencepiece_tokens_continue_a_text() -> None:
    tokenizer = sentencepiece_like()
    table = TokenBytes(tokenizer, skip_special_tokens=True)
    emoji = [4 + byte for byte in "🙂".encode()]
    tokens = [1, 2, 3, *emoji]
    content = b"".join(table[token] for token in tokens)
    assert content.decode() == " Hello world🙂" == " " + tokenizer.decode(tokens)


def test_a_decoder_that_is_no_concatenation_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), False)
