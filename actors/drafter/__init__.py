"""Guessing tokens before the target computes them: draft models, look-up, how far to guess."""
