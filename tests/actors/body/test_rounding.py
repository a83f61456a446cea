"""What roundings do to a deep model is no fault of who computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lexshard.actors.body.gpu.rounding import (
    AS_NEAR,
    AS_NEAR_AS_SIZES,
    MOST,
    apart,
    precisely,
    tolerated,
)
from lexshard.actors.body.self_test import TOLERANCES, plain_forward
from tests.support.tiny_models import SERVED, save_tiny

TOLERANCE = TOLERANCES[torch.bfloat16]


def plain_model(kind: str, folder: Path, dtype: torch.dtype, **changed: int) -> Any:
    import transformers

    save_tiny(kind, folder)
    config = transformers.AutoConfig.from_pretrained(folder, **changed)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():  # each layer magnifies what the one before has rounded
            if weight.ndim == 2:
                weight.normal_(0.0, 2.5 * weight.shape[1] ** -0.5)
    return model.to(dtype).eval()


def _hidden(model: Any, token_ids: Any, **changed: Any) -> list[torch.Tensor]:
    found = []
    with torch.inference_mode():
        for tokens in token_ids:
            asked = {name: each[:, : len(tokens)] for name, each in changed.items()}
            row = torch.tensor([tokens])
            states = model.base_model(input_ids=row, use_cache=False, **asked)
            found.append(states.last_hidden_state[0].float())
    return found


def _without_the_first_key(model: Any, token_ids: Any) -> list[torch.Tensor]:
    mask = torch.ones(1, max(map(len, token_ids)), dtype=torch.int64)
    mask[0, 0] = 0
    found = _hidden(model, token_ids, attention_mask=mask)
    return [torch.where(each.isfinite(), each, 0.0) for each in found]


def _with_a_gap(model: Any, token_ids: Any) -> list[torch.Tensor]:
    places = torch.arange(max(map(len, token_ids)))[None]
    return _hidden(model, token_ids, position_ids=places + (places > 3))


@pytest.mark.parametrize("kind", sorted(SERVED))
def test_it_is_what_the_whole_model_in_float32_computes_and_leaves_no_trace(
    tmp_path: Path, kind: str
) -> None:
    model = plain_model(kind, tmp_path, torch.bfloat16)
    stored = {name: each.clone() for name, each in model.state_dict().items()}
    expected = plain_forward(model)
    precise, _ = precisely(model, expected, TOLERANCE)
    for name, each in model.state_dict().items():
        assert each.dtype == stored[name].dtype, name
        assert torch.equal(each, stored[name]), name
    again = plain_forward(model)
    for a, b in zip(expected.hidden, again.hidden, strict=True):
        assert torch.equal(a, b)
    for ours, whole in zip(precise.hidden, plain_forward(model.float()).hidden, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-4)


def test_a_deep_model_is_judged_by_what_its_own_roundings_do(tmp_path: Path) -> None:
    model = plain_model("llama", tmp_path, torch.bfloat16, num_hidden_layers=40)
    expected = plain_forward(model)
    precise, tolerance = precisely(model, expected, TOLERANCE)
    own = apart(expected.hidden, precise.hidden)
    assert own > TOLERANCE
    assert tolerance == pytest.approx(min(AS_NEAR * own, MOST))
    # It still knows a fault: a first key that is not seen, a position that is left out.
    for wrong in (_without_the_first_key, _with_a_gap):
        assert apart(wrong(model, expected.token_ids), precise.hidden) > 1.5 * tolerance


def test_a_rank_is_judged_by_what_steps_of_other_sizes_do() -> None:
    alone = [torch.tensor([[1.0, -4.0]]), torch.tensor([[2.0, 3.0]])]
    assert tolerated(alone, alone, TOLERANCE) == TOLERANCE
    mixed = [alone[0] + 0.1, alone[1]]
    assert tolerated(alone, mixed, TOLERANCE) == pytest.approx(AS_NEAR_AS_SIZES * 0.1 / 4.0)
    assert tolerated(alone, [alone[0], -alone[1]], TOLERANCE) == MOST


def test_where_it_cannot_be_known_the_plain_pass_is_what_counts(tmp_path: Path) -> None:
    model = plain_model("llama", tmp_path, torch.bfloat16)
    expected = plain_forward(model)

    def refuse(*_: Any) -> None:
        raise RuntimeError("out of memory")

    model.base_model.layers[1].register_forward_pre_hook(refuse)
    assert precisely(model, expected, TOLERANCE) == (expected, TOLERANCE)
    assert all(each.dtype == torch.bfloat16 for each in model.parameters())
