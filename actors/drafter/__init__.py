"""Drafters: guesses at the tokens that sequences will draw next, which the target verifies."""
