"""Tokens guessed by a draft model: every step of a batch in one call."""
