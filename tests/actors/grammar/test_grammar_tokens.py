"""A grammar speaks of the bytes that clients get: llguidance reads a tokenizer as we do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lexshard.actors.grammar.grammars import compiled, grammar_tokenizer
from lexshard.actors.grammar.matcher import GrammarError
from lexshard.actors.text.token_bytes import TokenBytes
from lexshard.kernels.masks import ids_of
from tests.support.paths import DEMO

TEXT = ["Once upon a time, naïve café owners, 東京 and ½ of 7 🦊 came home.\n\n", "a  b\tc" * 9]


def sentencepiece_like(folder: Path) -> Any:
    """Words that begin with a low line, bytes for what is no piece."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefgho", "▁a", "▁b", "ab", "▁ab", "東"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(str(folder))
    return fast


def test_tokens_of_the_demo_are_the_bytes_that_clients_get() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO), local_files_only=True)
    ours = TokenBytes(tokenizer, skip_special_tokens=True)
    theirs = grammar_tokenizer(DEMO, len(tokenizer), (0, 4))
    special = {i for i, each in tokenizer.added_tokens_decoder.items() if each.special}
    for token_id in range(len(tokenizer)):
        if token_id not in special and ours[token_id] != b"\xff":  # which is in no text
            assert theirs.decode_bytes([token_id]) == ours[token_id]
    assert theirs.is_canonical
    assert theirs.tokenize_str(TEXT[0]) == tokenizer(TEXT[0]).input_ids


def test_tokens_of_sentencepiece_are_the_bytes_that_clients_get(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    ours = TokenBytes(tokenizer, skip_special_tokens=True)
    theirs = grammar_tokenizer(tmp_path, len(tokenizer), (1,))
    for token_id in range(2, len(tokenizer)):
        if ours[token_id] == b"\xff":  # which is in no text
            continue
        assert theirs.decode_bytes([token_id]) == ours[token_id]


def test_a_word_beyond_the_tokenizer_is_never_allowed() -> None:
    """The model's vocabulary may be larger than its tokenizer's, and no multiple of anything."""
    size = 16_384 + 37
    tokenizer = grammar_tokenizer(DEMO, size, (0, 4))
    matcher = compiled("start: /(.|\\n)+/", tokenizer, size, (0, 4))
    [words] = matcher.masks(())
    ids = ids_of(words, size)
    assert len(ids) > 16_000
    assert ids.max() < 16_384
    assert not {0, 4} & {*ids.tolist()}


@pytest.mark.parametrize(
    "text",
    ["start: (", 'start: "a" undefined', "%json {", '{"grammars": [{"json_schema": {"type": 3}}]}'],
)
def test_what_is_no_grammar_is_refused(text: str) -> None:
    tokenizer = grammar_tokenizer(DEMO, 16_384, (0, 4))
    with pytest.raises(GrammarError):
        compiled(text, tokenizer, 16_384, (0, 4))


def test_a_forced_run_is_the_same_token_by_token_and_whatever_was_guessed_between() -> None:
    tokenizer = grammar_tokenizer(DEMO, 16_384, (0, 4))
    text = 'start: "one certain word, and then" /[a-z]{3}/ "the end, of it all"'
    matcher = compiled(text, tokenizer, 16_384, (0, 4))
    said: list[int] = []
    free = 0
    while True:
        token_id = matcher.forced()
        [words] = matcher.masks(())
        allowed = ids_of(words, 16_384).tolist()
        if token_id is None:
            token_id = allowed[len(allowed) // 2]
            free += 1
        else:
            assert allowed == [token_id]
        for guess in (allowed[0], 11):
            count = matcher.accepted([guess, guess])
            matcher.masks([guess, guess][:count])
        assert [words.tobytes()] == [each.tobytes() for each in matcher.masks(())]
        said.append(token_id)
        if token_id in (0, 4):
            break
        matcher.consume([token_id])
    assert free in (1, 2, 3)
    assert said[-1] == 0
    whole = tokenizer.decode_str(said[:-1])
    assert whole.startswith("one certain word, and then")
    assert whole.endswith("the end, of it all")


@pytest.mark.parametrize("text", ["a<|end|>b", "<|user|>hi", "<|end|>", "<|endoftext|>\u00e9"])
def test_the_spelling_of_a_special_token_is_text_where_the_grammar_wants_text(text: str) -> None:
    tokenizer = grammar_tokenizer(DEMO, 16_384, (0, 4))
    matcher = compiled(f"start: {json.dumps(text)}", tokenizer, 16_384, (0, 4))
    said: list[int] = []
    while (token_id := matcher.forced()) != 0:
        assert token_id is not None
        assert not tokenizer.is_special_token(token_id)
        [words] = matcher.masks(())
        assert ids_of(words, 16_384).tolist() == [token_id]
        matcher.consume([token_id])
        said.append(token_id)
    assert tokenizer.decode_str(said) == text


def test_a_special_token_that_the_grammar_names_is_that_token() -> None:
    tokenizer = grammar_tokenizer(DEMO, 16_384, (0,))
    matcher = compiled('start: "a" <|end|> "b"', tokenizer, 16_384, (0,))
    said: list[int] = []
    while (token_id := matcher.forced()) != 0:
        assert token_id is not None
        matcher.consume([token_id])
        said.append(token_id)
    assert said[1:-1] == [4]


LONG = {
    "words": "one certain word, and then another of it all; " * 20,
    "code": "".join(f"    if x[{i}] >= {i * i}:\n\n\t\treturn 'it''s'\n" for i in range(16)),
    "digits": "".join(str(i * i) for i in range(180)),
    "no words": "abc" * 300,
    "quotes": "....'s'll''tre" * 60,
    "others": "東京½🦊é naïve " * 40,
    "spaces": (" " * 290 + "a") * 3,
}


@pytest.mark.parametrize("name", LONG)
def test_of_a_long_text_the_first_token_is_told_from_its_beginning(name: str) -> None:
    """The one that llguidance finds which reads all of it; masks say the same."""
    tokenizer = grammar_tokenizer(DEMO, 16_384, (0, 4))
    text = json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(LONG[name])}"}]})
    matcher = compiled(text, tokenizer, 16_384, (0, 4)).copy()
    whole = LLMatcher(tokenizer, text)
    long = 0
    while not whole.is_stopped():
        token_id = whole.compute_ff_tokens()[0]
        assert matcher.forced() == token_id
        long += matcher.long
        [words] = matcher.masks(())
        assert ids_of(words, 16_384).tolist() == [token_id]
        matcher.consume([token_id])
        whole.consume_token(token_id)
    assert long > 50
