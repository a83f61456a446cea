"""How many guesses of a draft stand with each of its heads: for `bench draft` and the recipe."""
