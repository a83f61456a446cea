"""The ranks of a parallel body in processes of their own: as children, and as Ray actors."""
