"""Screens on a device: tensor cores for tiers of bytes, Triton for the others."""
