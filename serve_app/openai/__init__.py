"""The OpenAI protocol: from a body to an engine request, from events to a response."""
