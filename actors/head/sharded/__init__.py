"""A head whose shards live in other processes: the root, the servers, and what they exchange."""
