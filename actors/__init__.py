"""The roles as plain classes: each runs in one process in tests and the embedded default."""
