"""Grammars: what a whole output must be, as masks of the tokens that may come next."""
