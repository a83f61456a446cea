"""`lexshard bench head`: from hidden states to tokens, the certified head beside dense ones."""
