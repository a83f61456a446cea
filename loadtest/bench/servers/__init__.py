"""Whole servers, ours and others, started by their command lines, asked and looked at."""
