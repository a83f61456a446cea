"""`lexshard bench sampler`: from logits or candidates to tokens, beside the sampler of vLLM."""
