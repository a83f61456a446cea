"""How many threads compute a step: measured when an engine starts."""
