"""Which models several ranks can share, and with which settings: told before anything is loaded.

Imported where nothing of an engine's is, so it needs nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lexshard.actors.body.errors import UnsupportedModelError
from lexshard.actors.body.families import FAMILIES, text_description
from lexshard.actors.configuration import EngineConfiguration

RANKS = (1, 2, 4, 8)  # what divides the leaves of `kernels.parallel`
# A leaf holds whole pairs of columns, as products in bfloat16 take them.
_COLUMNS = 2 * RANKS[-1]


def check_ranks(configuration: EngineConfiguration) -> None:
    """Raises ValueError for settings that a parallel body cannot have."""
    ranks = configuration.tensor_parallel
    if ranks is None:
        return
    if ranks not in RANKS:
        raise ValueError(f"--tensor-parallel {ranks}: a body is shared by 1, 2, 4 or 8 ranks")


def check_folder_shared(folder: Path, ranks: int) -> None:
    """`check_shared` of what a model's folder says, if it says anything: what is wrong with the
    folder itself is for `actors.body.loading.load` to refuse, and so is what a model that also sees
    leaves to be understood of its text."""
    try:
        description = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    text = text_description(description)
    if text is description or {"hidden_size", "num_attention_heads"} <= text.keys():
        check_shared(text, ranks)


def check_shared(description: Mapping[str, Any], ranks: int) -> None:
    """Whether ``ranks`` can share the model whose ``config.json`` says ``description``.

    Raises UnsupportedModelError that names what cannot be divided.
    """
    family = description.get("model_type", "a model without a type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"--tensor-parallel shares {', '.join(FAMILIES)}, not {family}: leave it out"
        )
    heads = int(description.get("num_attention_heads") or 0)
    hidden = int(description.get("hidden_size") or 0)
    if not heads or not hidden:
        raise UnsupportedModelError(
            f"this {family} does not say its hidden_size and num_attention_heads: leave "
            "--tensor-parallel out"
        )
    kv_heads = int(description.get("num_key_value_heads") or heads)
    width = int(description.get("head_dim") or hidden // heads)
    inner = int(description.get("intermediate_size") or 0)
    if heads % ranks:
        raise _indivisible(family, "num_attention_heads", heads, ranks)
    if kv_heads % ranks and ranks % kv_heads:
        raise _indivisible(family, "num_key_value_heads", kv_heads, ranks)
    for name, columns in (
        ("num_attention_heads x head_dim", heads * width),
        ("intermediate_size", inner),
    ):
        if not columns or columns % _COLUMNS:
            raise UnsupportedModelError(
                f"{name} of this {family} are {columns}, which is no multiple of {_COLUMNS}, so "
                "that its sums have no leaves of equal size: leave --tensor-parallel out"
            )


def _indivisible(family: str, name: str, count: int, ranks: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} of this {family} are {count}, which {ranks} ranks cannot share: give "
        "--tensor-parallel a number that divides it"
    )
