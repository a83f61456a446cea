"""Where the tokens of an echoed prompt begin in its text: ``text_offset``."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lexshard.actors.text.token_bytes import byte_level_alphabet
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.mock_engine import MockEngine, spell
from tests.support.mock_server import TOKENIZER, Client, serve

BEGIN = "<|begin|>"


def offsets(prompt: Any, tokenizer: ModelTokenizer, **fields: Any) -> list[int]:
    """Those of the prompt's tokens, and of the one that follows."""
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, **fields}

    async def check(client: Client) -> list[int]:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        told: list[int] = reply.json()["choices"][0]["logprobs"]["text_offset"]
        streamed = await client.post("/v1/completions", json={**body, "stream": True})
        assert str(told).replace(" ", "") in streamed.text
        return told

    found: list[int] = serve(check, MockEngine(script=lambda _: spell("x")), tokenizer)
    return found


def test_special_tokens_of_a_text_have_their_length() -> None:
    told = [0, *range(9, 12)]
    assert offsets(f"{BEGIN}Hi", TOKENIZER) == told
    assert offsets(f"{BEGIN}Hi", TOKENIZER, skip_special_tokens=False) == told
    assert offsets(f"aé{BEGIN}b", TOKENIZER) == [0, 1, 1, 2, 11, 12]


def test_special_tokens_that_a_text_made_of_ids_leaves_out_have_none() -> None:
    begin = 257
    ids = [begin, *b"a", begin, begin, *b"b"]
    assert offsets(ids, TOKENIZER) == [0, 0, 1, 1, 1, 2]
    shown = [0, 9, 10, 19, 28, 29]
    assert offsets(ids, TOKENIZER, skip_special_tokens=False) == shown
    # Half a character, then a special token: what comes behind is found again.
    assert offsets([0xC3, begin, *b"abcd"], TOKENIZER)[-2:] == [4, 5]


def sentence_pieces() -> ModelTokenizer:
    """A space before the first word, and a token that every prompt begins with."""
    vocabulary = {each: i for i, each in enumerate(["<unk>", "<s>", "▁Hi", "▁you", "▁", "x"])}
    made = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    made.add_special_tokens(["<unk>", "<s>"])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>"))


@pytest.mark.parametrize("skip", [True, False])
def test_what_a_tokenizer_puts_before_a_text_is_not_counted(skip: bool) -> None:
    tokenizer = sentence_pieces()
    told = [0, 0, 2, 6]
    assert offsets("Hi you", tokenizer, skip_special_tokens=skip)[:4] == told
    assert offsets("Hi Hi", tokenizer, skip_special_tokens=skip)[:4] == [0, 0, 2, 5]


def test_what_follows_text_that_a_tokenizer_takes_for_another_is_found_again() -> None:
    made = Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=made))
    text = unicodedata.normalize("NFD", "né, né!")
    assert len(text) == 9
    assert offsets(text, tokenizer) == [0, 1, 1, 3, 4, 5, 6, 6, 8, 9]
