"""Plans: who owns which rows, who runs where."""
