"""The sampling state of sequences, kept by deltas wherever it is needed: samplers and heads."""
