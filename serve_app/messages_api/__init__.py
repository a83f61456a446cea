"""Anthropic's Messages: translated to chat completions, with errors of their own shape."""
