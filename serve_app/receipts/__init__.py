"""Receipts over HTTP: written for replies, and verified."""
