"""The families of models that the fused body computes, alone or on several ranks."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
