"""The decision plane: samplers own sequences and decide their next tokens."""
