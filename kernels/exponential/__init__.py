"""Exponentials of plain arithmetic; in double precision they have the same bits everywhere."""
