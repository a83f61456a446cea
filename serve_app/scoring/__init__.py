"""Scores of texts: how likely a model says one label and not the others after them."""
