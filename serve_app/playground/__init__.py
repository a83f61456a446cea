"""The page at ``/``: a place to try the model, where every token shows why it is the right one."""
