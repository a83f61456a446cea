"""Benchmarks by subject (engine, head, sampler); here what all of them measure and report with."""
