"""Guessing the tokens that the target will draw: the heads that a draft model looks through."""
