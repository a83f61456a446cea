"""What several tests use: cases, stand-ins, servers."""
