"""What a server tells of itself: metrics, traces, log lines and its last faults."""
