"""Shards of the head as Ray actors, and the groups they form."""
