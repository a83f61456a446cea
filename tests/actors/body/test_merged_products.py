"""Products of one input as one: fewer launches, the same values, the weights in memory once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lexshard.actors.body.general import GeneralBody
from lexshard.actors.body.gpu.checked import merge_checked
from lexshard.actors.body.gpu.merged_products import FirstProduct, NextProduct
from lexshard.actors.body.self_test import plain_forward, run_mixed
from tests.support.recorded_steps import TOKENS, largest_difference
from tests.support.tiny_models import save_tiny

# Biases everywhere, on some, on none; experts; queries and keys that are normed; no groups at all.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "cohere", "phi3", "gpt2")


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(family: str, folder: Path) -> Any:
    save_tiny(family, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def weight_bytes(model: Any) -> int:
    return sum({each.data_ptr(): each.nbytes for each in model.parameters()}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_products_are_those_of_the_parts(family: str, tmp_path: Path) -> None:
    """Chunks, decoding and several sequences; then apart again, in the same memory."""
    model = model_of(family, tmp_path)
    before, plain = weight_bytes(model), plain_forward(model)
    body = GeneralBody(model, invariant=False)
    expected = run_mixed(body, TOKENS)
    merge_checked(body, plain, 1e-4)
    merged = [each for each in model.modules() if isinstance(each, FirstProduct)]
    assert bool(merged) == (family not in ("phi3", "gpt2"))
    assert largest_difference(run_mixed(body, TOKENS), expected) < 1e-5
    assert not any(any(part is not None for part in each.rest) for each in merged)
    assert weight_bytes(model) == before
    body.split_products()
    assert not any(isinstance(each, FirstProduct | NextProduct) for each in model.modules())
    assert largest_difference(run_mixed(body, TOKENS), expected) < 1e-5


def test_a_compiled_layer_has_four_products(tmp_path: Path) -> None:
    """Seven, were they apart. What it takes on the way leaves no trace in the layer."""
    products: Counter[str] = Counter()

    def count(graph: Any, inputs: Any) -> Any:
        products.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    body = GeneralBody(model_of("qwen3", tmp_path), invariant=False)
    expected = run_mixed(body, TOKENS)
    body.merge_products()
    run_mixed(body, TOKENS)
    body.compile_layers(count)  # type: ignore[arg-type]
    assert largest_difference(run_mixed(body, TOKENS), expected) < 1e-5
    [linear] = [name for name in products if "linear" in name]
    attention = [name for name in products if "paged_attention" in name]
    assert products[linear] == 4 * products[attention[0]]


def test_products_asked_for_in_another_order_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", tmp_path)
    expected = plain_forward(model)
    body = GeneralBody(model, invariant=False)
    before = run_mixed(body, TOKENS)
    layer = type(model.model.layers[0].mlp)
    monkeypatch.setattr(
        layer,
        "forward",
        lambda own, x: own.down_proj(own.up_proj(x) * own.act_fn(own.gate_proj(x))),
    )
    merge_checked(body, expected, 1e-4)
    assert not any(isinstance(each, FirstProduct) for each in model.modules())
    assert largest_difference(run_mixed(body, TOKENS), before) < 1e-5
