"""Which of transformers' causal language models are served: each family tried on a tiny model."""
