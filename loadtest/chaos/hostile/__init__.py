"""Requests no client should send, made from a seed, and what may come back."""
