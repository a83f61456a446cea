"""Samplers outside of the engine's process: child processes and Ray actors."""
