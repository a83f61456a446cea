"""Protocols that are answered by a chat completion: what their translations share."""
