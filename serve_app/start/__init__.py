"""From a configuration to a server that runs: what is checked, told, started and ended."""
