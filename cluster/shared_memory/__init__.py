"""Memory that two processes share, and a lock-free ring in it. Nothing of it has a name anywhere,
so nothing is left behind however the processes end."""
