"""The engine in a process of its own, and the supervisor that keeps one alive."""
