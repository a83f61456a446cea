"""A grammar accepts one token where its mask holds it, and no other, unless it says what follows.

`actors.engine.constraints` draws before masks by that.
"""

from __future__ import annotations

import numpy as np
import pytest

from lexshard.actors.grammar.grammars import compiled, grammar_tokenizer
from lexshard.actors.grammar.matcher import Matcher
from lexshard.kernels.masks import ids_of
from tests.support.grammar_cases import GRAMMARS, random_schemas, schema_grammar
from tests.support.paths import DEMO

SIZE = 16_384
# Their places are inside strings, mostly.
OPEN = tuple(map(schema_grammar, [{"type": "string"}, {"type": "array"}, {"type": "object"}]))


def accepted(matcher: Matcher) -> list[int]:
    return [token_id for token_id in range(SIZE) if matcher.accepted((token_id,))]


@pytest.mark.parametrize(
    "count", [pytest.param(12, id="12"), pytest.param(200, marks=pytest.mark.slow, id="200")]
)
def test_what_is_accepted_is_what_the_mask_holds(count: int) -> None:
    """Every token, at a place in ten of random texts under ``count`` schemas and other grammars.
    What must follow is accepted by whatever begins as it does, and held in one way alone."""
    random = np.random.default_rng(7)
    tokenizer = grammar_tokenizer(DEMO, SIZE, (0, 4))
    places = wide = 0
    for text in (*GRAMMARS, *3 * OPEN, *map(schema_grammar, random_schemas(count))):
        matcher = compiled(text, tokenizer, SIZE, (0, 4))
        for _ in range(40):
            held = ids_of(matcher.masks(())[0], SIZE)
            token_id = matcher.forced()
            if token_id is None:
                if random.random() < 0.1:
                    assert accepted(matcher) == held.tolist()
                    places, wide = places + 1, wide + (2 * len(held) >= SIZE)
                token_id = int(random.choice(held))
            if token_id in (0, 4):
                break
            matcher.consume((token_id,))
    assert places > 2 * count
    assert wide > 5
