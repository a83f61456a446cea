"""Talking to a server from a terminal: `lexshard chat` and `lexshard complete`."""
