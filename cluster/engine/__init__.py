"""The engine in a process of its own, and the client that keeps one alive."""
