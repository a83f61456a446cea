"""The vocabulary index: clusters and screening tiers of a model's output rows, in one file."""
