"""`lexshard bench draft`: how many guesses stand with each draft head, and what looking costs."""
