"""What an engine finds out and has compiled before it serves, or knows from an earlier start."""
