"""What is measured on where no model is at hand, or with a model's own states: heads and logits."""
