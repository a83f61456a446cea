"""Modules of transformers models whose rows do not depend on the rows beside them."""
