"""How long a server takes to its first token, from nothing and after its engine was killed."""
