"""A plugin for vLLM: the certified head and draw on vLLM's hidden states (docs/vllm.md).

It imports `lexshard.actors` and `lexshard.kernels` alone, and vLLM.
"""
