"""The certified head and draw on hidden states of other programs: no body, no engine."""
