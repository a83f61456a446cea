"""Where things live: configuration, the processes of engine and samplers, shared memory, Ray."""
