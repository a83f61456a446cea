"""What a grammar may cost, compiled and at every token. API processes refuse what engines would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Of llguidance, whose defaults allow 500 MB of lexer states, and masks of a second. Measured on one
# core of an AMD EPYC with 128,000 tokens, where masks of hostile grammars take up to 17 ms. Of
# 11,305 real schemas none needs more of a mask; with 100,000 of `step_lexer_fuel` and 1,000 items
# 13 of them lose valid instances, with llguidance's own 200,000 five.
PARSER: Final[dict[str, int | bool]] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # they would repeat what a client wrote, all of it
}


def parser_limits() -> LLParserLimits:
    """`PARSER` as llguidance takes it."""
    from llguidance import LLParserLimits

    return LLParserLimits(**PARSER)  # type: ignore[arg-type]
