"""A body on several ranks: what each has of the model, what they tell each other, who is lost."""
