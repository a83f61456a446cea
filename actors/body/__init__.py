"""Transformer bodies: from token ids to hidden states over a paged KV cache."""
