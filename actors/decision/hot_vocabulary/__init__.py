"""The hot vocabulary of a model: the tokens that are looked at first, and how many of them pay."""
