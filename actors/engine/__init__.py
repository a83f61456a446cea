"""The engine: continuous batching, from requests to events."""
