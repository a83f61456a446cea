"""The families of models that the fused body computes, alone or on several ranks, and their norms.

Imported where nothing of an engine's is, so it needs nothing itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

GEMMA = ("gemma", "gemma2", "gemma3_text")
# Models that also see, with the family of their text, which is a model by itself.
SEEING = {"gemma3": "gemma3_text"}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", *GEMMA)


class Norms(NamedTuple):
    """What checkpoints of a family call the norms of a layer: of what enters the gated MLP, and of
    what attention and that add to the hidden states, "" where these are not normed. ``added`` is
    added to the weights of every norm before they are multiplied with."""

    mlp: str = "post_attention_layernorm.weight"
    attended: str = ""
    inner: str = ""
    added: float = 0.0


def norms_of(family: str) -> Norms:
    """Those of one of `FAMILIES`."""
    if family not in GEMMA:
        return Norms()
    if family == "gemma":
        return Norms(added=1.0)
    return Norms(
        mlp="pre_feedforward_layernorm.weight",
        attended="post_attention_layernorm.weight",
        inner="post_feedforward_layernorm.weight",
        added=1.0,
    )


def text_description(description: dict[str, Any]) -> dict[str, Any]:
    """What a ``config.json`` says of the model's text: all it says, unless the model also sees.
    Such files leave out which activation their text has."""
    text = description.get("text_config")
    family = SEEING.get(description.get("model_type", ""))
    if family is None or not isinstance(text, dict):
        return description
    return {"hidden_activation": "gelu_pytorch_tanh", **text, "model_type": family}
