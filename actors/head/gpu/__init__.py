"""The head on a GPU: the same tokens from one CUDA graph per step."""
