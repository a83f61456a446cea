"""Which tokens a word bans: it, at the beginning of a text and after a space, and nothing else."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.mock_engine import MockEngine, ids
from tests.support.mock_server import Client, complete, serve


@pytest.mark.parametrize(
    ("word", "banned"),
    [
        ("Foo", ["Foo", " Foo"]),
        (" Foo", ["Foo", " Foo"]),
        ("\nFoo", ["\nFoo", " \nFoo"]),
        ("\n", ["\n"]),
        (" ", [" "]),
        ("  ", ["  "]),
    ],
)
def test_a_word_bans_what_it_says(word: str, banned: list[str]) -> None:
    """A line end alone banned every space, and one before a word the word wherever it stood."""
    engine = MockEngine()
    complete({"bad_words": [word]}, engine)
    [request] = engine.requests
    assert sorted(request.parameters.bad_words) == sorted(map(ids, banned))


def prefixing_tokenizer() -> ModelTokenizer:
    """As those of Llama 2: every text begins with a space, other bytes are tokens."""
    vocabulary = {"<unk>": 0, "▁": 1, "!": 2, "▁!": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokens = models.BPE(
        vocab=vocabulary, merges=[("▁", "!")], byte_fallback=True, unk_token="<unk>"
    )
    made = Tokenizer(tokens)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"))


@pytest.mark.parametrize(
    ("word", "banned"), [("\n", [(4 + 0x0A,)]), ("!", [(2,), (3,)]), ("a", [(4 + 0x61,)])]
)
def test_a_word_is_banned_inside_a_text_where_each_begins_with_a_space(
    word: str, banned: list[tuple[int, ...]]
) -> None:
    """A line end was banned behind a space alone."""
    engine = MockEngine()

    async def ask(client: Client) -> None:
        reply = await client.post("/v1/completions", json={"prompt": [5], "bad_words": [word]})
        assert reply.status_code == 200, reply.text

    serve(ask, engine, prefixing_tokenizer())
    [request] = engine.requests
    assert set(banned) <= set(request.parameters.bad_words)
