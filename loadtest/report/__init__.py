"""Pages with plots from what benchmarks wrote down with ``--json``."""
