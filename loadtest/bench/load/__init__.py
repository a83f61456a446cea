"""Load on an endpoint: what is asked when, who sends it, what became of it, and the figures."""
