"""Benchmarks, one module per subject; ``record`` is the format all of them report in."""
