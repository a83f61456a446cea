"""What goes where before anything starts: rows to shards, roles to nodes, and what that costs."""
