"""The body on a GPU: steps of a few fixed shapes, in CUDA graphs."""
