"""The output head: from hidden states to the tokens that can still be drawn, with certificates."""
