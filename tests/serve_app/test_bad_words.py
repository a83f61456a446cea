"""Which tokens a word bans: it, at the beginning of a text and after a space, and nothing else."""

from __future__ import annotations

import pytest

from tests.support.mock_engine import MockEngine, ids
from tests.support.mock_server import complete


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
