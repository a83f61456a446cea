"""How the models that ship beside this folder are made, and a router for any draft model."""
