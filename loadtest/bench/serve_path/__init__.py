"""The way from the engine to the wire: streamed tokens per second and what each process spends."""
