"""Benchmarks, against peers and against earlier versions."""
