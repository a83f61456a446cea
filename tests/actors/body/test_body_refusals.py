"""What cannot be served correctly is refused when it is loaded, with what to do about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from lexshard.actors.body import loading, paged_attention
from lexshard.actors.body.attention_step import AttentionSettings
from lexshard.actors.body.batch import Batch
from lexshard.actors.body.errors import (
    InsufficientMemoryError,
    ModelCodeError,
    ModelPathError,
    ModelRefusedError,
    SelfTestError,
    UnsupportedModelError,
    WeightsError,
)
from lexshard.actors.body.fused import FusedBody, FusedPlan, plan_of
from lexshard.actors.body.head_weights import HeadWeights, check_head
from lexshard.actors.body.loading import load
from lexshard.actors.body.model_code import model_code
from lexshard.actors.body.refusals import model_class
from lexshard.actors.body.self_test import (
    check_attention,
    check_body,
    check_windows,
    run_alone,
)
from lexshard.kernels.linear import Arithmetic
from lexshard.loadtest.bench.synthetic.random_model import write_random_model
from tests.support.quick import quick
from tests.support.tiny_models import REFUSED, mixture, save_tiny

BOTH_KINDS = ["full_attention", "sliding_attention"]
REASONS = {
    "gpt_oss": "s_aux",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "falcon": "_supports_attention_backend",
    "gptj": "_supports_attention_backend",
    "stablelm": "_supports_attention_backend",
    "llama_dynamic_rope": "dynamic rotary embeddings",
    "deepseek_v3": "MLA",
    "gemma4_text": "differ in head_dim",
    "mamba": "_supports_attention_backend",
    "xmod": r"does not work on text alone \(ValueError: Input language unknown",
    "t5": "encoder-decoder",
    "bert": "output head",
}


@pytest.mark.parametrize("family", quick(REFUSED, *(REFUSED.keys() - {"gpt_oss"})))
def test_families_that_would_be_wrong_are_refused(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    with pytest.raises(ModelRefusedError, match=REASONS[family]):
        load(tmp_path)


def _rewrite_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                }
            },
            "longrope .*cached: choose another",  # it scales the original context, too
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic .*cached: remove the scaling",
        ),
        ({"num_kv_shared_layers": 1}, "shares keys and values"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "new.Configuration"}}, "code of its own"),
        ({"model_type": "no_such_family"}, "cannot read"),
    ],
)
def test_configurations_that_would_be_wrong_are_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    _rewrite_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("alpha", [None, 1000.0])
def test_a_fixed_alpha_makes_dynamic_angles_the_same_at_every_length(alpha: float | None) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": alpha}
    config = AutoConfig.for_model("hunyuan_v1_dense", rope_parameters=rope)
    if alpha is not None:
        model_class(config)
        return
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        model_class(config)


def test_code_beside_a_known_model_is_left_alone(tmp_path: Path) -> None:
    """Many folders carry code for older versions of transformers: it is not needed and not run."""
    save_tiny("llama", tmp_path)
    _rewrite_config(tmp_path, auto_map={"AutoConfig": "bad.C", "AutoModelForCausalLM": "bad.M"})
    (tmp_path / "bad.py").write_text("raise SystemExit('this must not run')")
    assert load(tmp_path).body.batch_invariant


def test_a_missing_folder_or_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match="not a folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelPathError, match=r"config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_configuration_is_named(text: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json .* download"):
        load(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ModelCodeError, match="tokenizer"):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    _rewrite_config(tmp_path, intermediate_size=96)
    with pytest.raises(ModelCodeError, match="cannot make a LlamaForCausalLM"):
        load(tmp_path)


def test_what_a_models_code_raises_is_the_reason() -> None:
    told = r"^no luck \(ValueError: so it is\): do this$"
    with pytest.raises(ModelCodeError, match=told), model_code("no luck", "do this"):
        raise ValueError("so\nit is")
    with pytest.raises(ModelCodeError, match=r"x{50}\.\.\.\)"), model_code("no luck"):
        raise ValueError("x" * 1000)
    with pytest.raises(WeightsError, match="as it is"), model_code("no luck"):
        raise WeightsError("as it is")


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="incomplete"):
        load(tmp_path)
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="can run code"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0\0")
    with pytest.raises(WeightsError, match="not a safetensors file"):
        load(tmp_path)


def test_missing_weights_are_never_made_up(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match="up_proj"):
        load(tmp_path)


def test_memory_that_is_too_small_is_named_in_bytes(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(InsufficientMemoryError, match=r"need \d+ bytes .* 1000 bytes"):
        load(tmp_path, memory_bytes=1000)


def test_the_fused_body_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)
    with pytest.raises(UnsupportedModelError, match="body=general"):
        load(tmp_path, body="fused")


@pytest.mark.slow
def test_a_body_that_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft-cap lost on the way to attention must not go unnoticed."""
    save_tiny("gemma2", tmp_path)
    attend = paged_attention.attend

    def forgetful(*arguments: Any, **named: Any) -> Any:
        return attend(*arguments, **{**named, "softcap": None})

    monkeypatch.setattr(paged_attention, "attend", forgetful)
    with pytest.raises(SelfTestError, match="hidden states"):
        load(tmp_path, body="general")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_constant_that_is_a_little_off_is_refused(
    dtype: Literal["float32", "bfloat16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes less than rounding to bfloat16 does, so what rounds is checked without that."""

    def a_little_off(model: Any, arithmetic: Arithmetic) -> FusedPlan:
        plan = plan_of(model, arithmetic)
        return replace(plan, shape=plan.shape._replace(scale=1.01 * plan.shape.scale))

    save_tiny("qwen3", tmp_path)
    monkeypatch.setattr(loading, "plan_of", a_little_off)
    with pytest.raises(SelfTestError, match="of the fused body"):
        load(tmp_path, dtype, body="fused", device="cpu")


@pytest.mark.slow
def test_a_deep_model_of_which_rounding_makes_much_is_served_and_a_wrong_rounding_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 layers of random weights: single values differ by a ninth of the largest."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 40, "head_dim": 64}
    write_random_model(tmp_path, seed=1, vocab_size=16_384, **shape)
    assert load(tmp_path, "bfloat16", device="cpu").body.name == "fused"
    assert load(tmp_path, "bfloat16", body="general", device="cpu").body.batch_invariant
    forward = FusedBody.forward

    def half_lost(body: FusedBody, batch: Batch) -> torch.Tensor:
        hidden = forward(body, batch)
        hidden[:, ::2] = 0
        return hidden

    monkeypatch.setattr(FusedBody, "forward", half_lost)
    (tmp_path / "config.json").touch()  # else what was found is remembered
    with pytest.raises(SelfTestError, match="of the fused body, computed in one piece"):
        load(tmp_path, "bfloat16", body="fused", device="cpu")


def test_a_model_that_computes_with_a_packed_weight_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may look at the type of a weight that was replaced; its values are elsewhere."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP

    def forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        inner = x.to(mlp.dense_h_to_4h.weight.dtype) @ mlp.dense_h_to_4h.weight.T
        return mlp.dense_4h_to_h(mlp.act(inner + mlp.dense_h_to_4h.bias))

    save_tiny("gpt_neox", tmp_path)
    monkeypatch.setattr(GPTNeoXMLP, "forward", forward)
    with pytest.raises(SelfTestError, match="up to nan"):
        load(tmp_path)


def test_one_hidden_state_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save_tiny("gpt2", tmp_path)
    body = load(tmp_path, device="cpu").body
    tokens = [(3, 4, 5), (6, 7), (8,)]
    expected = [hidden.clone() for hidden in run_alone(body, tokens)]
    assert check_body(body, tokens, expected, "itself", 1e-4)
    expected[1][0, 0] = torch.nan
    with pytest.raises(SelfTestError, match="up to nan"):
        check_body(body, tokens, expected, "itself", 1e-4)


def _head(**changes: Any) -> tuple[HeadWeights, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator)
    settings = {"weight": weight, "bias": None, "softcap": None, "scale": 1.0, **changes}
    return HeadWeights(**settings), torch.randn(8, 16, generator=generator)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"scale": 0.25}, "multiplies its logits by 0.25"),
        ({"bias": torch.linspace(-1.0, 1.0, 50)}, "bias"),
        ({"softcap": 5.0}, "soft-cap"),
        ({"weight": torch.ones(50, 16)}, "other weights"),
    ],
)
def test_a_wrong_head_is_told_what_differs(model: dict[str, Any], reason: str) -> None:
    ours, hidden = _head()
    theirs, _ = _head(**model)
    check_head(ours, hidden, ours.logits(hidden), 1e-4)
    with pytest.raises(SelfTestError, match=reason):
        check_head(ours, hidden, theirs.logits(hidden), 1e-4)


def _windows(*windows: int) -> list[AttentionSettings]:
    return [AttentionSettings(1.0, window, 0.0) for window in windows]


def test_a_sliding_layer_that_hides_its_window_is_refused() -> None:
    by_layer = AutoConfig.for_model("gemma2", num_hidden_layers=2, layer_types=BOTH_KINDS)
    check_windows(_windows(0, 8), by_layer)
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        check_windows(_windows(0, 0), by_layer)
    everywhere = AutoConfig.for_model("mistral", sliding_window=8)
    check_windows(_windows(8, 8), everywhere)
    with pytest.raises(UnsupportedModelError, match="window of 8"):
        check_windows(_windows(0, 0), everywhere)


def test_a_window_that_the_model_itself_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention is told of any sliding_window, its mask is not: sequences of tests are too
    short to show it."""
    monkeypatch.setitem(REFUSED, "olmoe", mixture("OlmoeConfig", sliding_window=24))
    save_tiny("olmoe", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"24 tokens .* OlmoeConfig, .*: remove it"):
        load(tmp_path)
    _rewrite_config(tmp_path, sliding_window=None)
    assert load(tmp_path, device="cpu").body.batch_invariant


def test_a_body_attends_as_its_model_asks_for() -> None:
    check_attention(_windows(0, 8), _windows(0, 8))
    with pytest.raises(SelfTestError, match="layer 1"):
        check_attention(_windows(0, 0), _windows(0, 8))


@pytest.mark.parametrize(
    ("family", "changes", "attends"),
    [
        # Of these transformers reads none.
        ("mistral", {"use_sliding_window": False}, AttentionSettings(0.25, 11, 0.0)),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, None),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, None),
    ],
)
def test_what_a_description_says_in_vain_changes_nothing(
    family: str, changes: dict[str, Any], attends: AttentionSettings | None, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    _rewrite_config(tmp_path, **changes)
    body = load(tmp_path, device="cpu").body
    assert isinstance(body, FusedBody)
    assert body._shape.softcap == 0.0
    if attends is not None:
        assert set(body._weights.windows.tolist()) == {attends.window}


def test_where_sequences_end_is_among_what_is_drawn(tmp_path: Path) -> None:
    """Grammars take no other ids."""
    save_tiny("llama", tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [5, -1, 10**6]}))
    assert load(tmp_path, device="cpu").eos_token_ids == (5, 2)
    file.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(WeightsError, match="no id"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("content", [b"\xff" * 16, b"\x03" + bytes(7) + b"[1]"])
def test_what_is_no_safetensors_file_is_named(content: bytes, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="not a safetensors file"):
        load(tmp_path, device="cpu")


def test_an_index_that_is_left_over_is_not_read(tmp_path: Path) -> None:
    """Transformers reads the one file that is there, too."""
    save_tiny("llama", tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(tmp_path, device="cpu").parameters > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(ModelRefusedError, match="--device cpu"):
        load(tmp_path, device="cuda")
