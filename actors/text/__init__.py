"""Text to token ids and back, to the last byte."""
