"""What a grammar may cost. API processes refuse what engines would."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits


def parser_limits() -> LLParserLimits:
    """Of llguidance: half of its own defaults of what compiling and a step may cost (at about
    50,000 a millisecond, and 14,000), a tenth of the lexer's states (2 KB each)."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=25_000,
        max_grammar_size=250_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
